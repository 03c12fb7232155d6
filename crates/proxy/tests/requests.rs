//! Which HTTP requests pass a real Envoy, and how they arrive.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod world;

use std::collections::BTreeSet;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use wharf_policy::model::Direction;
use wharf_policy::requests::{HeaderRule, HttpRule, Pattern};
use wharf_proxy::{Content, Member, Verdict};
use world::*;

const GRPC_STATUS: http::HeaderName = http::HeaderName::from_static("grpc-status");

fn header(name: &str, value: Option<&str>) -> HttpRule {
    let rule = HeaderRule { name: name.into(), value: value.map(Into::into) };
    HttpRule { headers: BTreeSet::from([rule]), ..HttpRule::default() }
}

#[test]
fn a_request_passes_as_it_was_sent_and_the_answer_as_it_was_given() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(listener(EGRESS, Direction::Egress, allow([HttpRule::default()]), &[(7, &[CLIENT])])).await;

        let head = "POST /a?b=c HTTP/1.1\r\nHost: server.test:80\r\nX-MyHeader: Value\r\nX-Request-Id: mine\r\n\
                    Accept: */*\r\nX-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\nX-Forwarded-Client-Cert: Hash=1\r\n\
                    Content-Length: 0\r\n";
        let answer =
            exchange(connect(CLIENT, SERVER).await, format!("{head}Connection: close\r\n\r\n").as_bytes()).await;
        let (answer_head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let (peer, arrived) = body.split_once('\n').expect("the peer");
        assert_eq!(peer, format!("peer {CLIENT}"), "the server sees the client's address");
        let lines =
            |text: &str| text.lines().map(str::to_owned).filter(|line| !line.is_empty()).collect::<BTreeSet<_>>();
        assert_eq!(lines(arrived), lines(head), "nothing added, changed or left out");
        for line in ["HTTP/1.1 200 OK", "Server: echo", "X-Mixed-Case: yes"] {
            assert!(answer_head.lines().any(|there| there == line), "{line} in {answer_head}");
        }
        assert!(!answer_head.to_lowercase().contains("envoy"), "{answer_head}");

        let answer = request(CLIENT, "GET / HTTP/1.1\r\nHost: server.test").await;
        assert!(!answer.to_lowercase().contains("x-forwarded"), "{answer}");
    });
}

/// The headers of requests and answers of Envoy's documentation (configuration of HTTP headers, router filter, other
/// filters), and some that do not exist.
const OF_ENVOY: [&str; 40] = [
    "attempt-count",
    "decorator-operation",
    "degraded",
    "downstream-service-cluster",
    "downstream-service-node",
    "expected-rq-timeout-ms",
    "external-address",
    "force-trace",
    "hedge-on-per-try-timeout",
    "immediate-health-check-fail",
    "internal",
    "ip-tags",
    "is-timeout-retry",
    "local-overloaded",
    "max-retries",
    "not-forwarded",
    "original-dst-host",
    "original-host",
    "original-method",
    "original-path",
    "original-url",
    "overloaded",
    "peer-metadata",
    "peer-metadata-id",
    "ratelimited",
    "retriable-header-names",
    "retriable-status-codes",
    "retry-grpc-on",
    "retry-on",
    "rq-timeout-ms",
    "upstream-alt-stat-name",
    "upstream-canary",
    "upstream-healthchecked-cluster",
    "upstream-rq-per-try-timeout-ms",
    "upstream-rq-timeout-alt-response",
    "upstream-rq-timeout-ms",
    "upstream-service-time",
    "upstream-stream-duration-ms",
    "Of-Nobody",
    "x",
];

#[test]
fn no_header_of_envoys_reaches_a_server() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(listener(EGRESS, Direction::Egress, allow([HttpRule::default()]), &[(7, &[CLIENT])])).await;
        let own: String = OF_ENVOY.iter().map(|name| format!("X-Envoy-{name}: 1\r\n")).collect();
        // By the second one Envoy takes the client for one of a private network, whose headers it believes.
        for more in ["", "X-Forwarded-For: 10.0.0.1\r\n", "X-Forwarded-For: 192.0.2.1\r\n"] {
            let answer = request(CLIENT, &format!("GET / HTTP/1.1\r\nHost: a\r\n{own}{more}X-Envoys: mine")).await;
            let arrived: Vec<_> = answer.lines().filter(|line| line.to_lowercase().starts_with("x-envoy")).collect();
            assert_eq!(arrived, ["X-Envoys: mine"], "{more:?}: {answer}");
        }
    });
}

#[test]
fn requests_that_servers_answered_are_counted_always_and_told_to_who_watches() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let mut world = World::start();
        drop(world.watching.take());
        world.ensure(listener(EGRESS, Direction::Egress, allow([get("/a")]), &[(7, &[CLIENT])])).await;
        let ask = async |path: &str| request(CLIENT, &format!("GET {path} HTTP/1.1\r\nHost: a")).await;
        let path = |record: &wharf_proxy::Record| match &record.content {
            Content::Http { path, .. } => path.clone(),
            other => panic!("{other:?}"),
        };

        assert!(ask("/a").await.contains(" 200 ") && ask("/b").await.contains(" 403 "));
        let denied = world.record().await;
        assert_eq!((path(&denied).as_str(), denied.verdict, denied.is_counted), ("/b", Verdict::Denied, false));

        let watching = world.proxy.watch();
        tokio::time::timeout(LONG, watching.begun()).await.expect("acknowledged");
        // A worker has the value some time after the main thread, which acknowledges.
        let mut asked = 1;
        let told = loop {
            assert!(asked < 1_000 && ask("/a").await.contains(" 200 "), "the {asked}th is not told");
            asked += 1;
            if let Ok(record) = tokio::time::timeout(std::time::Duration::from_millis(300), world.records.recv()).await
            {
                break record.expect("a record");
            }
        };
        assert_eq!((path(&told).as_str(), told.verdict, told.is_counted), ("/a", Verdict::Forwarded, true));

        let counted = async || {
            while world.proxy.status().forwarded < asked {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
            world.proxy.status().forwarded
        };
        assert_eq!(tokio::time::timeout(LONG, counted()).await, Ok(asked), "without the denied one");
    });
}

#[test]
fn each_field_of_a_rule_is_judged() {
    let method = |pattern| HttpRule { method: Some(pattern), ..HttpRule::default() };
    let path = |pattern| HttpRule { path: Some(pattern), ..HttpRule::default() };
    let host = |pattern| HttpRule { host: Some(pattern), ..HttpRule::default() };
    let exact = |text: &str| Pattern::Exact(text.into());
    let regex = |text: &str| Pattern::Regex(text.into());
    let prefix = |text: &str| Pattern::Prefix(text.into());
    // Rule, what passes, what does not.
    let cases = [
        (method(exact("PUT")), "PUT / HTTP/1.1\r\nHost: a", "GET / HTTP/1.1\r\nHost: a"),
        (method(regex("GET|PROPFIND")), "PROPFIND / HTTP/1.1\r\nHost: a", "POST / HTTP/1.1\r\nHost: a"),
        (path(exact("/a?b=c")), "GET /x/../a?b=c HTTP/1.1\r\nHost: a", "GET /a HTTP/1.1\r\nHost: a"),
        (path(prefix("/public/")), "GET /public/a HTTP/1.1\r\nHost: a", "GET /public/../secret HTTP/1.1\r\nHost: a"),
        (path(prefix("/a")), "GET //a HTTP/1.1\r\nHost: a", "GET /a/..%2fb HTTP/1.1\r\nHost: a"),
        (path(prefix("")), "GET /any HTTP/1.1\r\nHost: a", "OPTIONS * HTTP/1.1\r\nHost: a\r\nX-Broken"),
        (path(regex("/v[0-9]+/.*")), "GET /v12/x HTTP/1.1\r\nHost: a", "GET /a/v1/x HTTP/1.1\r\nHost: a"),
        (host(exact("a.test:80")), "GET / HTTP/1.1\r\nHost: a.test:80", "GET / HTTP/1.1\r\nHost: a.test"),
        (host(regex(".*\\.test")), "GET / HTTP/1.1\r\nHost: b.test", "GET / HTTP/1.1\r\nHost: b.test.evil"),
        (header("x-key", Some("1")), "GET / HTTP/1.1\r\nHost: a\r\nX-Key: 1", "GET / HTTP/1.1\r\nHost: a\r\nX-Key: 2"),
        (header("x-key", None), "GET / HTTP/1.1\r\nHost: a\r\nX-Key: any", "GET / HTTP/1.1\r\nHost: a"),
        // Envoy itself adds this one: that must not count.
        (
            header("x-forwarded-proto", None),
            "GET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-Proto: http",
            "GET / HTTP/1.1\r\nHost: a",
        ),
    ];
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        for (member, (rule, passes, does_not)) in (1..).zip(cases) {
            let what = format!("{rule:?}");
            world.ensure(listener(EGRESS, Direction::Egress, allow([rule]), &[(member, &[CLIENT])])).await;
            let answer = request(CLIENT, passes).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{what}: {answer}");
            let answer = request(CLIENT, does_not).await;
            assert!(answer.starts_with("HTTP/1.1 40"), "{what}: {answer}");
            assert!(!answer.contains("peer "), "{what} reached the server: {answer}");
        }
    });
}

#[test]
fn what_passed_and_what_was_denied_is_recorded_with_its_member() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let mut world = World::start();
        world.ensure(listener(EGRESS, Direction::Egress, allow([get("/allowed")]), &[(7, &[CLIENT])])).await;

        let answer = request(CLIENT, "GET /allowed HTTP/1.1\r\nHost: server.test").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let record = world.record().await;
        assert_eq!((record.verdict, record.member), (Verdict::Forwarded, Member { id: 7, epoch: 107 }));
        assert_eq!(record.listener.to_string(), "egress-15001");
        assert_eq!(record.destination, Some((SERVER_ADDRESS, PORT).into()));
        assert_eq!(record.server, record.destination);
        assert_eq!(record.source.map(|source| source.ip().to_string()).as_deref(), Some(CLIENT));

        let answer = request(CLIENT, "PURGE /other HTTP/1.1\r\nHost: server.test").await;
        assert!(answer.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{answer}");
        assert!(answer.ends_with("\r\n\r\nAccess denied\r\n"), "{answer}");
        let record = world.record().await;
        assert_eq!((record.verdict, record.server), (Verdict::Denied, None));
        let expected = Content::Http {
            protocol: "HTTP/1.1",
            method: "PURGE".into(),
            path: "/other".into(),
            host: "server.test".into(),
            status: 403,
        };
        assert_eq!(record.content, expected);
        assert_eq!(world.proxy.status().records_lost, 0);
    });
}

#[test]
fn http_2_without_tls_stays_http_2_and_each_request_is_judged() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let listening = TcpListener::bind((SERVER, PORT)).await.expect("the server's port");
        let server = tokio::spawn(async move {
            let (stream, _) = listening.accept().await.expect("a connection");
            let mut connection = h2::server::handshake(stream).await.expect("HTTP/2");
            let mut paths = Vec::new();
            while let Some(Ok((request, mut respond))) = connection.accept().await {
                paths.push(request.uri().path().to_owned());
                let mut body = respond.send_response(http::Response::new(()), false).expect("an answer");
                let status = http::HeaderMap::from_iter([(GRPC_STATUS, http::HeaderValue::from_static("0"))]);
                body.send_trailers(status).expect("trailers");
            }
            paths
        });
        let mut world = World::start();
        world.ensure(listener(EGRESS, Direction::Egress, allow([get("/allowed")]), &[(7, &[CLIENT])])).await;

        let (mut client, connection) = h2::client::handshake(connect(CLIENT, SERVER).await).await.expect("HTTP/2");
        let driver = tokio::spawn(connection);
        let mut answers = Vec::new();
        for (path, kind) in [("/other", "text/plain"), ("/other", "application/grpc"), ("/allowed", "application/grpc")]
        {
            let request = http::Request::get(format!("http://server.test{path}")).header("content-type", kind);
            let (response, _) = client.send_request(request.body(()).expect("a request"), true).expect("sent");
            let response = tokio::time::timeout(LONG, response).await.expect("in time").expect("an answer");
            let (head, mut body) = response.into_parts();
            while let Some(bytes) = body.data().await {
                let length = bytes.expect("bytes").len();
                body.flow_control().release_capacity(length).expect("capacity");
            }
            let trailers = body.trailers().await.expect("an end").unwrap_or_default();
            let grpc_status = head.headers.get(GRPC_STATUS).or(trailers.get(GRPC_STATUS)).cloned();
            answers.push((head.status.as_u16(), grpc_status.map(|status| status.to_str().expect("text").to_owned())));
            client = client.ready().await.expect("the connection lives");
        }
        // gRPC has its own word for a denial (7, PERMISSION_DENIED) and for what went well (0).
        assert_eq!(answers, [(403, None), (200, Some("7".into())), (200, Some("0".into()))]);
        for verdict in [Verdict::Denied, Verdict::Denied, Verdict::Forwarded] {
            let record = world.record().await;
            assert_eq!(record.verdict, verdict, "{record:?}");
            assert!(matches!(record.content, Content::Http { protocol: "HTTP/2", .. }), "{record:?}");
        }
        driver.abort();
        // Envoy closes the connection to the server when that is idle.
        let paths = tokio::time::timeout(LONG, server).await.expect("in time").expect("a task");
        assert_eq!(paths, ["/allowed"]);
    });
}

#[test]
fn a_websocket_passes_both_ways() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        world.ensure(listener(EGRESS, Direction::Egress, allow([get("/chat")]), &[(7, &[CLIENT])])).await;

        let upgrade = |path: &str| {
            format!(
                "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
        };
        let mut stream = connect(CLIENT, SERVER).await;
        stream.write_all(upgrade("/chat").as_bytes()).await.expect("sent");
        let mut got = String::new();
        while !got.ends_with("\r\n\r\n") {
            got.push(char::from(stream.read_u8().await.expect("an answer")));
        }
        assert!(got.starts_with("HTTP/1.1 101 "), "{got}");
        for word in [b"one", b"two"] {
            stream.write_all(word).await.expect("sent");
            let mut back = [0; 3];
            stream.read_exact(&mut back).await.expect("sent back");
            assert_eq!(&back, word);
        }
        let mut stream = connect(CLIENT, SERVER).await;
        stream.write_all(upgrade("/other").as_bytes()).await.expect("sent");
        let mut status = [0; 12];
        stream.read_exact(&mut status).await.expect("an answer");
        assert_eq!(&status, b"HTTP/1.1 403");
    });
}
