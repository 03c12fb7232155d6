//! What is told of requests: `wharf monitor --type l7`, and the metrics.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    process::{Child, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use wharf_api::{MonitorEvent, RequestEvent};
use wharf_tests::{
    Node, NodeConfig,
    dns::{self, DnsServer, Over, REFUSED},
    scenario, wait,
    web::WebClient,
};

use crate::{Scene, await_realized, pods::import};

/// Asked for until the monitors are there; told and left out.
const PROBE: &str = "/probe";
/// Asked for last.
const LAST: &str = "/last";

/// `wharf monitor --type l7`, until dropped.
struct Monitor {
    child: Child,
    lines: Receiver<String>,
}

impl Monitor {
    fn start(node: &Node, more: &[&str]) -> Result<Self> {
        let mut command = node.wharf_command(&[&["monitor", "--type", "l7"], more].concat())?;
        let mut child = command.stdout(Stdio::piped()).spawn().context("start the monitor")?;
        let output = child.stdout.take().context("its output")?;
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            // It ends with the monitor, or with the one who reads.
            for line in BufReader::new(output).lines().map_while(|line| line.ok()) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(Self { child, lines })
    }

    /// Whether something was told.
    fn tells(&self) -> bool {
        self.lines.try_recv().is_ok()
    }

    /// All lines until one is about the last request, without those of probes.
    fn rest(&self) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        loop {
            let line = self.lines.recv_timeout(wait::PATIENCE);
            let line = line.with_context(|| format!("the monitor is silent after {lines:#?}"))?;
            if line.contains(LAST) {
                return Ok(lines);
            }
            if !line.contains(PROBE) {
                lines.push(line);
            }
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if self.child.kill().is_ok() {
            self.child.wait().ok();
        }
    }
}

/// `web` may ask `db` for some paths and for one name.
fn rules() -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: told}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: web}}}}\n  egress:\n  - toEntities: [cluster]\n    toPorts:\n    \
         - ports: [{{port: '80', protocol: TCP}}]\n      rules: {{http: [{{path: '/public|{PROBE}|{LAST}'}}]}}\n    \
         - ports: [{{port: '53', protocol: UDP}}]\n      rules: {{dns: [{{matchName: api.test}}]}}\n"
    )
}

/// `wharf_proxy_requests_total` by verdict.
fn counted(node: &Node) -> Result<BTreeMap<String, u64>> {
    let text = node.http("GET", "/metrics", None)?.text();
    let of = |line: &str| -> Option<(String, u64)> {
        let (verdict, count) = line.strip_prefix("wharf_proxy_requests_total{verdict=\"")?.split_once("\"} ")?;
        Some((verdict.to_owned(), count.parse().ok()?))
    };
    Ok(text.lines().filter_map(of).collect())
}

#[test]
fn each_request_and_query_is_told_once_and_counted() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let addresses = scene.db.end.both()?;
        let zone = [("api.test".to_owned(), vec!["198.51.100.3".parse()?])].into();
        let resolver = DnsServer::start(scene.db.space()?, &addresses, zone)?;
        import(node, &rules())?;
        await_realized(node)?;
        let (id, [to, _]) = (node.endpoint(&scene.web.end)?.id, scene.servers()?);
        let (json, text) = (Monitor::start(node, &["-o", "json"])?, Monitor::start(node, &[])?);
        // One connection: one of Envoy's threads tells of all its requests in order.
        let mut client = WebClient::connect(scene.web.space()?, to)?;
        let (mut probes, mut telling) = (0, [false, false]);
        wait::until("the monitors tell of probes", || {
            ensure!(client.ask("GET", PROBE, "web", "")? == 200, "a probe");
            probes += 1;
            telling = [telling[0] || json.tells(), telling[1] || text.tells()];
            Ok((telling == [true, true]).then_some(()))
        })?;
        let ask = |name| dns::ask(scene.web.space()?, addresses[0], name, Over::Udp);
        ensure!(ask("api.test")?.0 == 0 && ask("secret.test")?.0 == REFUSED, "queries are judged");
        ensure!(client.ask("GET", "/public", "shop.test", "")? == 200, "allowed");
        ensure!(client.ask("POST", "/secret?q=1", "shop.test", "")? == 403, "denied");
        ensure!(client.ask("GET", LAST, "web", "")? == 200, "the last one");

        let lines = json.rest()?;
        let mut told = lines.iter().map(|line| request(line)).collect::<Result<Vec<_>>>()?;
        told.sort_by(|a, b| (&a.protocol, &a.verdict).cmp(&(&b.protocol, &b.verdict)));
        let [refused, answered, denied, allowed] = &told[..] else { anyhow::bail!("{lines:#?}") };
        let own = scene.web.end.v4()?;
        for event in &told {
            ensure!((event.endpoint, event.direction.as_str()) == (id, "egress"), "{event:?}");
            ensure!(event.source.is_some_and(|from| from.ip() == own), "{event:?}");
        }
        // A query that is refused does not leave the agent.
        for event in [allowed, denied, answered] {
            ensure!(event.latency_us.is_some_and(|us| us > 0), "no latency: {event:?}");
        }
        let words = |e: &RequestEvent| {
            (e.verdict.clone(), e.method.clone(), e.host.clone(), e.path.clone(), e.status, e.response.clone())
        };
        let expected = |verdict: &str, method: &str, host: &str, path: &str, status: u16, response: &str| {
            (verdict.to_owned(), method.to_owned(), host.to_owned(), path.to_owned(), status, response.to_owned())
        };
        ensure!(words(allowed) == expected("forwarded", "GET", "shop.test", "/public", 200, ""), "{allowed:?}");
        ensure!(words(denied) == expected("denied", "POST", "shop.test", "/secret?q=1", 403, ""), "{denied:?}");
        ensure!(words(answered) == expected("forwarded", "A", "api.test", "", 0, "NOERROR"), "{answered:?}");
        ensure!(words(refused) == expected("denied", "A", "secret.test", "", 0, "REFUSED"), "{refused:?}");
        ensure!(allowed.destination == Some(to) && denied.destination == Some(to), "{allowed:?}, {denied:?}");

        let lines = text.rest()?;
        for words in [
            "egress forwarded GET http://shop.test/public -> 200 ",
            "egress denied POST http://shop.test/secret?q=1 -> 403 ",
            "egress forwarded DNS A api.test -> NOERROR ",
            "egress denied DNS A secret.test -> REFUSED, ",
        ] {
            let words = format!(" endpoint {id} {words}");
            ensure!(lines.len() == 4 && lines.iter().any(|line| line.contains(&words)), "{words} in {lines:#?}");
        }
        let expected = [("forwarded", probes + 3), ("denied", 2), ("failed", 0)];
        let expected = expected.map(|(verdict, count)| (verdict.to_owned(), count)).into();
        wait::until_equal("requests by verdict", &expected, || counted(node))?;
        drop((client, resolver));
        scene.end(node)
    })
}

/// A line of the monitor as what it tells.
fn request(line: &str) -> Result<RequestEvent> {
    match serde_json::from_str(line).with_context(|| line.to_owned())? {
        MonitorEvent::L7(event) => Ok(event),
        other => anyhow::bail!("{other:?}"),
    }
}
