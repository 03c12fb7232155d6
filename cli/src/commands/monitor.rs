//! `wharf monitor` and `wharf bpf events list`.

use std::{
    future,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use wharf_api::{EndpointFilter, MonitorEvent, PacketEvent, RequestEvent};

use super::Context;
use crate::{
    args::{EventFilter, EventKind},
    error::{CliError, Exit},
    output::remark,
    render::monitor::line,
};

/// Drops from joining multicast groups at interface start; every container has them.
const MULTICAST: &str = "multicast-unsupported";
const HIDDEN: &str =
    "wharf: drops with the reason multicast-unsupported are not shown; `--all` or `--reason` shows them";
const NO_TRACING: &str = "wharf: no endpoint that is asked about traces its packets, so there are no trace events; `wharf endpoint \
    config ID --trace on` turns tracing on for one endpoint, `wharf config set trace=on` for all";

/// `None`: any endpoint. True if the request fails.
async fn traces(cx: &Context, of: Option<&Of>) -> bool {
    const SETTING: &str = "trace";
    match cx.client.config().await {
        Ok(node) if node.effective.get(SETTING).is_some_and(|value| value == "false") => {}
        _ => return true,
    }
    let ids: Vec<u16> = match of {
        Some(of) => vec![of.id],
        None => match cx.client.endpoints(&EndpointFilter::default()).await {
            Ok(endpoints) => endpoints.iter().map(|e| e.id).collect(),
            Err(_) => return true,
        },
    };
    for id in ids {
        // A deleted endpoint does not trace.
        let config = cx.client.endpoint_config(&id.to_string()).await;
        if config.is_ok_and(|config| config.desired.get(SETTING).is_some_and(|value| value == "true")) {
            return true;
        }
    }
    false
}

/// Ends after `count` events, after `time`, or with the stream (exit 2).
pub(super) async fn run(
    cx: &Context,
    filter: EventFilter,
    count: Option<u64>,
    time: Option<Duration>,
) -> Result<Exit, CliError> {
    let asks_for_traces = filter.kinds == [EventKind::Trace];
    let wanted = Wanted::new(cx, filter).await?;
    if asks_for_traces && !traces(cx, wanted.endpoint.as_ref()).await {
        remark(NO_TRACING);
    }
    let mut stream = cx.client.monitor().await?;
    let end = async {
        match time {
            Some(time) => tokio::time::sleep(time).await,
            None => future::pending().await,
        }
    };
    tokio::pin!(end);
    let (mut shown, mut has_hidden) = (0, false);
    while count.is_none_or(|max| shown < max) {
        let event = tokio::select! {
            // Pending events precede the time limit.
            biased;
            event = stream.next() => event?,
            () = &mut end => return Ok(Exit::Ok),
        };
        let Some(event) = event else {
            return Err(CliError {
                exit: Exit::Unreachable,
                message: "the agent ended the stream of events".to_owned(),
                hint: Some("it was stopped or restarted; start `wharf monitor` again".to_owned()),
            });
        };
        if wanted.hides(&event) {
            if !has_hidden {
                remark(HIDDEN);
            }
            has_hidden = true;
        } else if wanted.matches(&event) {
            cx.out.emit_line(&event, |style| line(&event, style))?;
            // A gap is printed but not counted.
            shown += u64::from(!matches!(event, MonitorEvent::Lost { .. }));
        }
    }
    Ok(Exit::Ok)
}

/// A drop by the policy of the receiving endpoint, counted for the sender.
pub(super) const BY_PEER: &str = "peer-policy-denied";

#[derive(Debug, Clone)]
struct Of {
    id: u16,
    addresses: Vec<IpAddr>,
}

impl Of {
    /// Also packets that the endpoint's policy dropped at the other end.
    fn has(&self, p: &PacketEvent) -> bool {
        let is_end = |ip: Option<IpAddr>| ip.is_some_and(|ip| self.addresses.contains(&ip));
        u32::from(self.id) == p.endpoint || (p.reason == BY_PEER && (is_end(p.source) || is_end(p.destination)))
    }
}

struct Wanted {
    kinds: Vec<EventKind>,
    endpoint: Option<Of>,
    from: Option<IpAddr>,
    to: Option<IpAddr>,
    reasons: Vec<String>,
    all: bool,
}

impl Wanted {
    async fn new(cx: &Context, filter: EventFilter) -> Result<Self, CliError> {
        let EventFilter { kinds, endpoint, from, to, reasons, all } = filter;
        let endpoint = match endpoint {
            Some(target) => {
                let e = cx.client.endpoint(target.as_str()).await?;
                let addresses = e.ipv4.map(IpAddr::from).into_iter().chain(e.ipv6.map(IpAddr::from)).collect();
                Some(Of { id: e.id, addresses })
            }
            None => None,
        };
        let [from, to] = [from, to].map(|address| address.map(|address| address.to_canonical()));
        Ok(Self { kinds, endpoint, from, to, reasons, all })
    }

    fn hides(&self, event: &MonitorEvent) -> bool {
        let is_usual = matches!(event, MonitorEvent::Drop(p) if p.reason == MULTICAST);
        is_usual && !self.all && self.reasons.is_empty() && self.matches(event)
    }

    fn matches(&self, event: &MonitorEvent) -> bool {
        match event {
            MonitorEvent::Drop(p) => self.wants(EventKind::Drop) && self.matches_packet(p),
            MonitorEvent::Trace(p) => self.wants(EventKind::Trace) && self.matches_packet(p),
            MonitorEvent::Agent(a) => {
                // Agent events have no addresses or reason: such filters select packets.
                let packets_only = self.from.is_some() || self.to.is_some() || !self.reasons.is_empty();
                self.wants(EventKind::Agent)
                    && !packets_only
                    && self.endpoint.as_ref().is_none_or(|of| a.endpoint == Some(of.id))
            }
            MonitorEvent::L7(r) => self.wants(EventKind::L7) && self.matches_request(r),
            MonitorEvent::Lost { .. } => true,
        }
    }

    fn wants(&self, kind: EventKind) -> bool {
        self.kinds.is_empty() || self.kinds.contains(&kind)
    }

    /// A request has no reason: a reason filter selects packets.
    fn matches_request(&self, r: &RequestEvent) -> bool {
        let is = |wanted: Option<IpAddr>, end: Option<SocketAddr>| {
            wanted.is_none() || end.map(|end| end.ip().to_canonical()) == wanted
        };
        self.endpoint.as_ref().is_none_or(|of| of.id == r.endpoint)
            && is(self.from, r.source)
            && is(self.to, r.destination)
            && self.reasons.is_empty()
    }

    fn matches_packet(&self, p: &PacketEvent) -> bool {
        self.endpoint.as_ref().is_none_or(|of| of.has(p))
            && (self.from.is_none() || p.source == self.from)
            && (self.to.is_none() || p.destination == self.to)
            && (self.reasons.is_empty() || self.reasons.contains(&p.reason))
    }
}

#[cfg(test)]
mod tests {
    use wharf_api::AgentEvent;

    use super::*;

    fn all() -> Wanted {
        Wanted { kinds: Vec::new(), endpoint: None, from: None, to: None, reasons: Vec::new(), all: false }
    }

    fn of(id: u16) -> Option<Of> {
        Some(Of { id, addresses: vec![IpAddr::from([10, 0, 1, u8::try_from(id).unwrap_or_default()])] })
    }

    fn packet() -> PacketEvent {
        PacketEvent {
            time_unix_ms: 0,
            endpoint: 7,
            epoch: 1,
            identity: 5,
            direction: "egress".to_owned(),
            reason: "malformed".to_owned(),
            rule: None,
            ethertype: "IPv4".to_owned(),
            protocol: "UDP".to_owned(),
            message: None,
            source: "10.0.0.1".parse().ok(),
            source_port: 1,
            destination: "10.0.0.2".parse().ok(),
            destination_port: 2,
            length: 60,
        }
    }

    /// Drop, trace, event of endpoint 7, agent event, loss.
    fn shown(wanted: &Wanted) -> [bool; 5] {
        let agent = |endpoint| AgentEvent { time_unix_ms: 0, endpoint, event: String::new(), message: String::new() };
        [
            MonitorEvent::Drop(packet()),
            MonitorEvent::Trace(packet()),
            MonitorEvent::Agent(agent(Some(7))),
            MonitorEvent::Agent(agent(None)),
            MonitorEvent::Lost { count: 1 },
        ]
        .map(|e| wanted.matches(&e))
    }

    #[test]
    fn requests_are_filtered_by_endpoint_and_ends() {
        let request = MonitorEvent::L7(RequestEvent {
            time_unix_ms: 0,
            endpoint: 7,
            epoch: 1,
            direction: "ingress".to_owned(),
            verdict: "denied".to_owned(),
            protocol: "HTTP/1.1".to_owned(),
            method: "GET".to_owned(),
            path: "/".to_owned(),
            host: "a".to_owned(),
            status: 403,
            response: String::new(),
            latency_us: None,
            source: "[::ffff:10.0.0.1]:4711".parse().ok(),
            destination: "10.0.0.2:80".parse().ok(),
            flags: String::new(),
        });
        let ip = |s: &str| s.parse::<IpAddr>().ok();
        for (wanted, shown) in [
            (all(), true),
            (Wanted { kinds: vec![EventKind::L7], ..all() }, true),
            (Wanted { kinds: vec![EventKind::Drop], ..all() }, false),
            (Wanted { endpoint: of(7), ..all() }, true),
            (Wanted { endpoint: of(8), ..all() }, false),
            (Wanted { from: ip("10.0.0.1"), ..all() }, true),
            (Wanted { from: ip("10.0.0.2"), ..all() }, false),
            (Wanted { to: ip("10.0.0.2"), ..all() }, true),
            (Wanted { to: ip("10.0.0.1"), ..all() }, false),
            (Wanted { reasons: vec!["malformed".to_owned()], ..all() }, false),
        ] {
            assert_eq!(wanted.matches(&request), shown);
        }
    }

    #[test]
    fn a_drop_by_the_policy_of_an_endpoint_is_shown_for_that_endpoint_too() {
        let denied = |to: [u8; 4], reason: &str| PacketEvent {
            reason: reason.to_owned(),
            destination: Some(to.into()),
            ..packet()
        };
        let receiver = Wanted { endpoint: of(9), ..all() };
        for (packet, shown) in [
            (denied([10, 0, 1, 9], BY_PEER), true),
            (denied([10, 0, 1, 8], BY_PEER), false),
            (denied([10, 0, 1, 9], "policy-denied"), false),
        ] {
            assert_eq!(receiver.matches(&MonitorEvent::Drop(packet)), shown);
        }
    }

    #[test]
    fn multicast_is_left_out_unless_it_is_asked_for() {
        let event = MonitorEvent::Drop(PacketEvent { reason: MULTICAST.to_owned(), ..packet() });
        let asked = vec![MULTICAST.to_owned()];
        for (wanted, hidden) in [
            (all(), true),
            (Wanted { kinds: vec![EventKind::Drop], ..all() }, true),
            (Wanted { endpoint: of(7), ..all() }, true),
            // Hidden by another filter.
            (Wanted { endpoint: of(8), ..all() }, false),
            (Wanted { kinds: vec![EventKind::Agent], ..all() }, false),
            (Wanted { all: true, ..all() }, false),
            (Wanted { reasons: asked, ..all() }, false),
        ] {
            assert_eq!(wanted.hides(&event), hidden);
        }
        assert!(!all().hides(&MonitorEvent::Drop(packet())));
    }

    #[test]
    fn filters() {
        let ip = |s: &str| s.parse::<IpAddr>().ok();
        assert_eq!(shown(&all()), [true; 5]);
        assert_eq!(shown(&Wanted { kinds: vec![EventKind::Drop], ..all() }), [true, false, false, false, true]);
        assert_eq!(
            shown(&Wanted { kinds: vec![EventKind::Trace, EventKind::Agent], ..all() }),
            [false, true, true, true, true]
        );
        assert_eq!(shown(&Wanted { endpoint: of(7), ..all() }), [true, true, true, false, true]);
        assert_eq!(shown(&Wanted { endpoint: of(8), ..all() }), [false, false, false, false, true]);
        assert_eq!(shown(&Wanted { from: ip("10.0.0.1"), ..all() }), [true, true, false, false, true]);
        assert_eq!(shown(&Wanted { from: ip("10.0.0.2"), ..all() }), [false, false, false, false, true]);
        assert_eq!(shown(&Wanted { to: ip("10.0.0.2"), ..all() }), [true, true, false, false, true]);
        let reasons = vec!["multicast-unsupported".to_owned(), "malformed".to_owned()];
        assert_eq!(shown(&Wanted { reasons, ..all() }), [true, true, false, false, true]);
        let reasons = vec!["malform".to_owned()];
        assert_eq!(shown(&Wanted { reasons, ..all() }), [false, false, false, false, true]);
    }
}
