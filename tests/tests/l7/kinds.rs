//! Each kind of rule: what it lets pass, and what it does not, by both families.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context as _, Result, bail, ensure};
use wharf_tests::{
    NodeConfig,
    echo::EchoServer,
    scenario, wait,
    web::{WebClient, WebServer},
};

use crate::{
    PORT, Scene, await_realized,
    pods::{Ask, Pod, import},
    tls::client_hello,
};

/// A request: method, path, host, further header lines.
type Request = (&'static str, &'static str, &'static str, &'static str);

/// A list of `http`, requests that pass, and requests that do not.
const KINDS: [(&str, &[Request], &[Request]); 8] = [
    (
        "[{method: 'GET|PUT'}]",
        &[("GET", "/", "a", ""), ("PUT", "/x", "b", "")],
        &[("POST", "/", "a", ""), ("DELETE", "/", "a", ""), ("PATCH", "/", "a", "")],
    ),
    (
        "[{path: '/v[0-9]+/.*'}]",
        &[("GET", "/v12/x", "a", ""), ("GET", "/x/../v1/", "a", ""), ("POST", "//v1/x?y", "a", "")],
        &[("GET", "/v/x", "a", ""), ("GET", "/a/v1/x", "a", ""), ("GET", "/v1/../x", "a", "")],
    ),
    (
        "[{path: /search}]",
        &[("GET", "/search", "a", "")],
        &[("GET", "/search?q=1", "a", ""), ("GET", "/search/", "a", ""), ("GET", "/SEARCH", "a", "")],
    ),
    (
        "[{host: 'shop\\.test(:80)?'}]",
        &[("GET", "/", "shop.test", ""), ("GET", "/", "shop.test:80", "")],
        &[("GET", "/", "shopxtest", ""), ("GET", "/", "shop.test.evil", ""), ("GET", "/", "shop.test:81", "")],
    ),
    (
        "[{headers: ['X-Key: 1']}]",
        &[("GET", "/", "a", "X-Key: 1\r\n"), ("GET", "/", "a", "x-KEY:  1\r\n")],
        &[("GET", "/", "a", ""), ("GET", "/", "a", "X-Key: 12\r\n"), ("GET", "/", "a", "X-Keys: 1\r\n")],
    ),
    (
        "[{headers: ['X-Any']}]",
        &[("GET", "/", "a", "X-Any: whatever\r\n")],
        &[("GET", "/", "a", ""), ("GET", "/", "a", "X-Other: X-Any\r\n")],
    ),
    (
        "[{headerMatches: [{name: X-Token, value: 'a.c'}]}]",
        &[("GET", "/", "a", "X-Token: a.c\r\n")],
        &[("GET", "/", "a", "X-Token: abc\r\n"), ("GET", "/", "a", "")],
    ),
    (
        "[{method: GET, path: /a, headers: ['X-Key: 1']}, {method: POST, path: '/b.*', host: shop}]",
        &[("GET", "/a", "any", "X-Key: 1\r\n"), ("POST", "/b/c", "shop", "")],
        &[
            ("GET", "/a", "any", ""),
            ("POST", "/a", "any", "X-Key: 1\r\n"),
            ("GET", "/b", "shop", ""),
            ("POST", "/b", "other", "X-Key: 1\r\n"),
        ],
    ),
];
/// The port of the first kind; each has one of its own.
const FIRST: u16 = 8_000;

/// A rule for who may ask `db`: for each item of `toPorts` its ports and what they may carry.
fn rules(peers: &str, items: &[(u16, String)]) -> String {
    let items = items.iter().map(|(port, more)| format!("    - ports: [{{port: '{port}', protocol: TCP}}]\n{more}"));
    format!("  - {peers}\n    toPorts:\n{}", items.collect::<String>())
}

fn policy(rules: &[String]) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: kinds}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: db}}}}\n  ingress:\n{}",
        rules.concat()
    )
}

fn http(list: &str) -> String {
    format!("      rules: {{http: {list}}}\n")
}

fn ask(from: &Pod, to: SocketAddr, (method, path, host, more): Request) -> Result<u16> {
    let mut client = WebClient::connect(from.space()?, to)?;
    client.ask(method, path, host, more).with_context(|| format!("{method} {path} of {host} at {to}, {more:?}"))
}

#[test]
fn each_field_of_an_http_rule_is_judged() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let ports: Vec<u16> = (FIRST..).take(KINDS.len()).collect();
        let items: Vec<_> = ports.iter().copied().zip(KINDS.map(|(list, ..)| http(list))).collect();
        import(node, &policy(&[rules("fromEntities: [cluster]", &items)]))?;
        await_realized(node)?;
        for (port, (list, passes, does_not)) in ports.into_iter().zip(KINDS) {
            let server = WebServer::start(scene.db.space()?, port)?;
            for address in scene.db.end.both()? {
                let to = SocketAddr::new(address, port);
                for (requests, wanted) in [(passes, 200), (does_not, 403)] {
                    for request in requests {
                        let status = ask(&scene.web, to, *request)?;
                        ensure!(status == wanted, "{list}: {status} for {request:?} at {to}");
                    }
                }
            }
            let served = server.served().len();
            ensure!(served == 2 * passes.len(), "{list}: {served} requests came to the server");
        }
        scene.end(node)
    })
}

/// Sends a handshake's first message to a server that sends back what it gets; whether it came back.
fn handshake(from: &Pod, to: SocketAddr, name: Option<&str>) -> Result<bool> {
    let hello = client_hello(name);
    let mut stream = from.connect(to)?;
    stream.set_read_timeout(Some(wait::PATIENCE))?;
    let mut back = vec![0; hello.len()];
    match stream.write_all(&hello).and_then(|()| stream.read_exact(&mut back)) {
        Ok(()) => {
            ensure!(back == hello, "{name:?}: another message reached the server");
            Ok(true)
        }
        Err(e) if [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset].contains(&e.kind()) => Ok(false),
        Err(e) => bail!("{name:?} to {to}: {e}"),
    }
}

#[test]
fn a_handshake_passes_for_its_server_name_alone() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let server = EchoServer::start(scene.db.space()?)?;
        let port = server.tcp_at(IpAddr::from([0; 4])).port();
        let names = "      serverNames: [api.test, '**.deep.test']\n".to_owned();
        import(node, &policy(&[rules("fromEntities: [cluster]", &[(port, names)])]))?;
        await_realized(node)?;
        let cases = [
            (Some("api.test"), true),
            (Some("x.api.test"), false),
            (Some("api.test.evil"), false),
            (Some("deep.test"), false),
            (Some("x.deep.test"), true),
            (Some("x.y.deep.test"), true),
            (Some("xdeep.test"), false),
            (None, false),
        ];
        for address in scene.db.end.both()? {
            let to = SocketAddr::new(address, port);
            for (name, passes) in cases {
                let passed = handshake(&scene.web, to, name)?;
                ensure!(passed == passes, "{name:?} at {to} passed: {passed}");
            }
            ensure!(ask(&scene.web, to, ("GET", "/", "api.test", ""))? == 403, "without TLS nothing passes at {to}");
        }
        scene.end(node)
    })
}

#[test]
fn one_peer_passes_whole_and_another_by_its_requests_at_one_port() -> Result<()> {
    scenario(NodeConfig::default().with_envoy()?, |node| {
        let scene = Scene::new(node)?;
        let (plain, other) = (Pod::container(node, "plain", "plain")?, Pod::container(node, "other", "other")?);
        let peer = |app: &str| format!("fromEndpoints: [{{matchLabels: {{app: {app}}}}}]");
        let of_web = rules(&peer("web"), &[(PORT, http("[{path: /public}]"))]);
        import(node, &policy(&[rules(&peer("plain"), &[(PORT, String::new())]), of_web]))?;
        await_realized(node)?;
        for to in scene.servers()? {
            ensure!(ask(&scene.web, to, ("GET", "/public", "db", ""))? == 200, "{to}: what rules allow");
            ensure!(ask(&scene.web, to, ("GET", "/secret", "db", ""))? == 403, "{to}: what they do not");
            let mut client = WebClient::connect(plain.space()?, to)?;
            ensure!(client.ask("GET", "/secret", "db", "")? == 200, "{to}: the peer without requests");
            let (last, own) = (scene.server.served().pop().context("a request")?, client.local()?);
            let seen = SocketAddr::new(last.client.ip().to_canonical(), last.client.port());
            ensure!(seen == own, "the server sees {seen}: Envoy is between it and {own}");
            ensure!(!other.reaches(to.ip(), Ask::Tcp(PORT))?, "{to}: a peer of no rule");
        }
        [plain, other].iter().try_for_each(|pod| node.detach(&pod.end))?;
        scene.end(node)
    })
}
