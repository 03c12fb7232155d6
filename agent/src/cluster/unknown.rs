//! Counts packets that policy drops because the labels of the other node's container are unknown.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use ipnet::IpNet;
use wharf_cluster::routes;
use wharf_common::{Direction, DropReason, Event, EventKind, PeerRow};
use wharf_core::identity::Identity;
use wharf_kit::sync::lock;

use super::{Cluster, InForce};

/// Container networks of other nodes, which do not overlap.
#[derive(Default)]
pub(super) struct Networks {
    of: Option<Arc<InForce>>,
    cidrs: BTreeSet<IpNet>,
}

impl Networks {
    fn follow(&mut self, now: Arc<InForce>) {
        if self.of.as_ref().is_some_and(|of| Arc::ptr_eq(of, &now)) {
            return;
        }
        self.cidrs = routes::peers(&now.destinations).into_iter().collect();
        self.of = Some(now);
    }

    fn contain(&self, ip: IpAddr) -> bool {
        self.cidrs.range(..=IpNet::from(ip)).next_back().is_some_and(|cidr| cidr.contains(&ip))
    }
}

/// Direction and other end of a packet that policy dropped.
pub type Dropped = (Direction, IpAddr);

/// Of these events.
pub fn dropped(events: &[Event]) -> Vec<Dropped> {
    events.iter().filter_map(peer).collect()
}

fn peer(event: &Event) -> Option<Dropped> {
    let by_policy = [DropReason::PolicyDenied, DropReason::PeerPolicyDenied].map(|reason| reason as u32);
    if event.kind != EventKind::Drop as u32 || !by_policy.contains(&event.reason) {
        return None;
    }
    let direction = Direction::from_u32(event.direction)?;
    let bytes = match direction {
        Direction::Ingress => event.source,
        Direction::Egress => event.destination,
    };
    Some((direction, Ipv6Addr::from(bytes).to_canonical()))
}

impl Cluster {
    /// Packets whose other end the kernel has as `unknown-pod` now: in ingress, in egress.
    pub async fn unknown_pods(&self, dropped: &[Dropped]) -> [u64; 2] {
        let mut counts = [0; 2];
        let candidates: BTreeSet<IpAddr> = {
            let mut networks = lock(&self.networks);
            networks.follow(self.in_force());
            dropped.iter().map(|(_, ip)| *ip).filter(|ip| networks.contain(*ip)).collect()
        };
        if candidates.is_empty() {
            return counts;
        }
        let candidates = Vec::from_iter(candidates);
        let rows = self.kernel.observe_peer_rows(&candidates).await.unwrap_or_default();
        let is_unknown = |row: &Option<PeerRow>| row.is_some_and(|row| row.identity == Identity::UNKNOWN_POD.0);
        let unknown: BTreeSet<IpAddr> =
            candidates.into_iter().zip(rows).filter(|(_, row)| is_unknown(row)).map(|(ip, _)| ip).collect();
        for (direction, _) in dropped.iter().filter(|(_, ip)| unknown.contains(ip)) {
            let [ingress, egress] = &mut counts;
            *match direction {
                Direction::Ingress => ingress,
                Direction::Egress => egress,
            } += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use wharf_cluster::{file, routes::Destination};
    use wharf_core::{
        kernel::{NextHop, PolicyKernel as _},
        policy::{Mode, RowChange},
    };
    use wharf_datapath::FakeKernel;

    use super::*;
    use crate::config::{AgentConfig, Flags};

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("address")
    }

    fn drop_of(direction: Direction, source: &str, destination: &str) -> Event {
        let bytes = |text: &str| match ip(text) {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        Event {
            kind: EventKind::Drop as u32,
            reason: DropReason::PolicyDenied as u32,
            direction: direction as u32,
            source: bytes(source),
            destination: bytes(destination),
            ..Event::default()
        }
    }

    #[tokio::test]
    async fn drops_are_counted_by_the_kernels_identity_of_the_other_end() {
        let kernel = Arc::new(FakeKernel::new());
        let rows = [
            ("10.2.0.0/16", Identity::UNKNOWN_POD.0),
            ("10.2.0.1/32", Identity::REMOTE_NODE.0),
            ("10.2.0.9/32", 1 << 16),
            ("fd00:2::/64", Identity::UNKNOWN_POD.0),
        ];
        let rows = rows.map(|(net, identity)| {
            let row = PeerRow { identity, class: 0 };
            RowChange::Peer(net.parse().expect("network"), Some(row))
        });
        kernel.change_policy(rows.into(), Mode::default()).await.expect("rows");
        let flags = Flags::try_parse_from(["wharf-agent", "--node-name=a"]).expect("flags parse");
        let cluster = Cluster::new(&AgentConfig::load(flags).expect("loads"), kernel);
        use Direction::{Egress, Ingress};
        let all = [
            drop_of(Ingress, "10.2.0.5", "10.1.0.5"),
            drop_of(Ingress, "10.2.0.1", "10.1.0.5"),
            drop_of(Ingress, "10.2.0.9", "10.1.0.5"),
            drop_of(Egress, "10.1.0.5", "10.2.0.5"),
            drop_of(Egress, "10.1.0.5", "10.2.0.6"),
            drop_of(Egress, "fd00:1::5", "fd00:2::5"),
            // To an endpoint of this node, and to the outside.
            drop_of(Egress, "10.2.0.5", "10.1.0.5"),
            drop_of(Egress, "10.1.0.5", "203.0.113.9"),
        ];
        assert_eq!(cluster.unknown_pods(&super::dropped(&all)).await, [0, 0], "without other nodes");
        let via = || Ok(NextHop::Direct(ip("192.0.2.2")));
        let to = |cidr: &str| Destination { node: "b".into(), cidr: cidr.parse().expect("CIDR"), via: via() };
        let nodes = file::parse("[[node]]\nname = \"a\"\naddresses = [\"192.0.2.1\"]\n").expect("nodes");
        let destinations = vec![to("10.2.0.0/16"), to("fd00:2::/64")];
        cluster.in_force.send_replace(Arc::new(InForce { nodes, destinations, ..InForce::default() }));
        assert_eq!(cluster.unknown_pods(&super::dropped(&all)).await, [1, 3]);
        let other = |change: fn(&mut Event)| {
            let mut event = drop_of(Ingress, "10.2.0.5", "10.1.0.5");
            change(&mut event);
            event
        };
        let others = [
            other(|event| event.kind = EventKind::Trace as u32),
            other(|event| event.reason = DropReason::InvalidSourceIp as u32),
            other(|event| event.direction = 7),
        ];
        assert_eq!(cluster.unknown_pods(&super::dropped(&others)).await, [0, 0], "no drops by policy");
    }
}
