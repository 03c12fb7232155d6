//! Tests against a server that sends arbitrary bytes.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::PathBuf,
    thread::JoinHandle,
};

use serde_json::{Value, json};

use super::*;
use crate::{
    EndpointState, ErrorCode, GcAttachment, IpFamily, NamespaceLabels, PolicyDeleteQuery, PolicyExplainQuery,
    PolicyImport, PolicyProtocol,
};

/// Serves connections sequentially; closes each after its answer.
struct Server {
    socket: PathBuf,
    thread: JoinHandle<Vec<String>>,
}

impl Server {
    /// Calls `answer` after the whole request.
    fn start(connections: usize, mut answer: impl FnMut(&mut UnixStream) + Send + 'static) -> Self {
        let socket = fresh_path();
        let listener = UnixListener::bind(&socket).unwrap();
        let thread = std::thread::spawn(move || {
            let mut requests = Vec::new();
            for _ in 0..connections {
                let (mut stream, _) = listener.accept().unwrap();
                requests.push(read_request(&mut stream));
                answer(&mut stream);
            }
            requests
        });
        Self { socket, thread }
    }

    fn client(&self) -> Client {
        Client::new(&self.socket).with_timeout(Duration::from_secs(10))
    }

    fn requests(self) -> Vec<String> {
        let requests = self.thread.join().unwrap();
        std::fs::remove_file(&self.socket).unwrap();
        requests
    }
}

fn fresh_path() -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("wharf-api-client-{}-{n}.sock", std::process::id()))
}

fn read_request(stream: &mut UnixStream) -> String {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ").map(str::to_owned))
                .map_or(0, |n| n.parse().unwrap());
            if body.len() >= length {
                return text;
            }
        }
        match stream.read(&mut chunk).unwrap() {
            0 => return text,
            n => bytes.extend_from_slice(&chunk[..n]),
        }
    }
}

fn reply(status: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}

fn once(answer: Vec<u8>) -> Server {
    Server::start(1, move |stream| stream.write_all(&answer).unwrap())
}

fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn endpoint() -> Value {
    json!({
        "id": 7, "epoch": 9, "state": "ready", "container_id": "c1", "ifname": "eth0", "network": "net", "identity": 256,
        "labels": ["cni:a=b"], "ipv4": "10.0.0.7", "ipv6": null, "ifindex": 12, "host_ifname": "wh7", "container_mac":
        "02:00:00:00:00:07", "host_mac": "02:00:00:00:00:08", "gateway4": "10.0.0.1", "gateway6": null, "mtu": 1500,
        "pool": "default", "netns": "/run/netns/c1", "created_unix_ms": 1,
        "status": {"phase": "", "since_unix_ms": 1, "waits_for": "", "ends_when": "", "desired_revision": 1,
                   "realized_revision": 1, "regenerations": 1, "failures": 0}
    })
}

#[test]
fn put_sends_the_body_and_parses_the_endpoint() {
    let server = once(reply("201 Created", &endpoint().to_string()));
    let create = EndpointCreate {
        container_id: "c1".into(),
        ifname: "eth0".into(),
        network: "net".into(),
        netns: "/run/netns/c1".into(),
        pool: None,
        mtu: None,
        mac: None,
        ips: vec!["10.0.0.7".parse().unwrap()],
        labels: vec![],
        pod_name: None,
        pod_namespace: None,
        runtime: None,
        deadline_ms: Some(60_000),
        ports: vec![],
        masquerade: None,
        bandwidth: Default::default(),
        source_prefixes: vec![],
        ipam: None,
        gateways: vec![],
        routes: None,
        chained: false,
    };
    let made = run(server.client().put_endpoint("cni-attachment-id:c1:eth0", &create)).unwrap();
    assert_eq!((made.id, made.epoch, made.state), (7, 9, EndpointState::Ready));
    let requests = server.requests();
    let (head, body) = requests[0].split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("PUT /v1/endpoint/cni-attachment-id:c1:eth0 HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("content-type: application/json"), "{head}");
    assert_eq!(serde_json::from_str::<EndpointCreate>(body).unwrap(), create);
}

#[test]
fn routes() {
    let wanted = [
        "GET /v1/healthz",
        "GET /v1/config",
        "PATCH /v1/config",
        "GET /v1/endpoint",
        "GET /v1/endpoint?container-id=c%26x%3D1&network=n&state=waiting-to-regenerate&label=k8s:app%3Dweb&pod-name=p",
        "GET /v1/endpoint/1%2F..%2F..%3Fx%23%25%20%C3%A9",
        "PATCH /v1/endpoint/1",
        "DELETE /v1/endpoint/1?no-ip-release=true&network=harbour&epoch=3",
        "DELETE /v1/endpoint?container-id=c1",
        "GET /v1/endpoint/1/log",
        "GET /v1/endpoint/1/healthz",
        "GET /v1/endpoint/1/labels",
        "GET /v1/endpoint/1/config",
        "GET /v1/ipam",
        "POST /v1/ipam",
        "POST /v1/ipam/fd00::1?owner=a%20b",
        "DELETE /v1/ipam/10.0.0.1",
        "GET /v1/map",
        "GET /v1/map/1%2FCONFIG",
        "GET /v1/metrics",
        "GET /v1/cluster/pods?namespace=shop&node=b%26c&limit=7",
        "GET /v1/bpf/ct",
        "DELETE /v1/bpf/ct?endpoint=pod-name:a%2Fb&address=fd00::%2F64&port=53&protocol=udp&state=closing&all=true",
        "GET /v1/audit",
        "POST /v1/audit",
        "POST /v1/gc",
        "GET /v1/policy",
        "PUT /v1/policy",
        "DELETE /v1/policy?kind=NetworkPolicy&namespace=shop&name=db",
        "DELETE /v1/policy?all=true",
        "GET /v1/policy/explain?from=container-id:3f%2Feth0&to=fd00::1",
        "GET /v1/policy/explain?from=7&to=pod-name:a%2Fb&protocol=icmpv6&port=128",
        "GET /v1/endpoint/ipv4:10.0.0.1/policy",
        "GET /v1/namespace",
        "PUT /v1/namespace/a%2Fb",
        "DELETE /v1/namespace/shop",
    ];
    let refusal = reply("404 Not Found", &json!({"code": "not-found", "message": "no"}).to_string());
    let server = Server::start(wanted.len(), move |stream| stream.write_all(&refusal).unwrap());
    let client = server.client();
    let filter = EndpointFilter {
        container_id: Some("c&x=1".into()),
        network: Some("n".into()),
        state: Some(EndpointState::WaitingToRegenerate),
        label: Some("k8s:app=web".into()),
        pod_name: Some("p".into()),
    };
    let delete =
        DeleteQuery { network: Some("harbour".into()), no_ip_release: Some(true), epoch: Some(3), container_id: None };
    let allocate = IpamAllocate { pool: None, family: Some(IpFamily::Ipv4), owner: "me".into() };
    let flows = FlowQuery {
        endpoint: Some("pod-name:a/b".into()),
        address: "fd00::/64".parse().ok(),
        port: Some(53),
        protocol: "17".parse().ok(),
        state: Some(FlowState::Closing),
        limit: None,
        all: Some(true),
    };
    let pods = ClusterPodsQuery { namespace: Some("shop".into()), node: Some("b&c".into()), limit: Some(7) };
    let gc = GcRequest {
        network: "n".into(),
        valid: vec![GcAttachment { container_id: "c".into(), ifname: "eth0".into() }],
        runtime: None,
    };
    let import = PolicyImport { file: "db.yaml".into(), text: "{}".into() };
    let one_policy = PolicyDeleteQuery {
        kind: Some("NetworkPolicy".into()),
        namespace: Some("shop".into()),
        name: Some("db".into()),
        all: None,
    };
    let packet =
        PolicyExplainQuery { from: "container-id:3f/eth0".into(), to: "fd00::1".into(), protocol: None, port: None };
    let ping = PolicyExplainQuery {
        from: "7".into(),
        to: "pod-name:a/b".into(),
        protocol: Some(PolicyProtocol::Icmpv6),
        port: Some(128),
    };
    run(async {
        let codes = [
            client.status().await.err(),
            client.config().await.err(),
            client.patch_config(&AgentConfigPatch::default()).await.err(),
            client.endpoints(&EndpointFilter::default()).await.err(),
            client.endpoints(&filter).await.err(),
            client.endpoint("1/../..?x#% é").await.err(),
            client.patch_endpoint("1", &EndpointPatch::default()).await.err(),
            client.delete_endpoint("1", &delete).await.err(),
            client.delete_container("c1", &DeleteQuery::default()).await.err(),
            client.endpoint_log("1").await.err(),
            client.endpoint_health("1").await.err(),
            client.endpoint_labels("1").await.err(),
            client.endpoint_config("1").await.err(),
            client.ipam().await.err(),
            client.allocate_ip(&allocate).await.err(),
            client.allocate_exact("fd00::1".parse().unwrap(), "a b").await.err(),
            client.release_ip("10.0.0.1".parse().unwrap()).await.err(),
            client.maps().await.err(),
            client.map("1/CONFIG").await.err(),
            client.metrics_rows().await.err(),
            client.cluster_pods(&pods).await.err(),
            client.flows(&FlowQuery::default()).await.err(),
            client.remove_flows(&flows).await.err(),
            client.audit(false).await.err(),
            client.audit(true).await.err(),
            client.gc(&gc).await.err(),
            client.policies().await.err(),
            client.import_policy(&import).await.err(),
            client.delete_policy(&one_policy).await.err(),
            client.delete_policy(&PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() }).await.err(),
            client.explain_policy(&packet).await.err(),
            client.explain_policy(&ping).await.err(),
            client.endpoint_policy("ipv4:10.0.0.1").await.err(),
            client.namespaces().await.err(),
            client.put_namespace("a/b", &NamespaceLabels::default()).await.err(),
            client.delete_namespace("shop").await.err(),
        ];
        for (error, route) in codes.into_iter().zip(wanted) {
            assert!(error.as_ref().is_some_and(ClientError::is_not_found), "{route}: {error:?}");
        }
    });
    for (request, want) in server.requests().iter().zip(wanted) {
        assert_eq!(request.lines().next(), Some(format!("{want} HTTP/1.1").as_str()));
    }
}

#[test]
fn partial_delete_is_an_answer() {
    let body = json!({"deleted": [7], "errors": [{"step": "unpin", "endpoint": "7", "message": "busy"}]});
    let server = once(reply("206 Partial Content", &body.to_string()));
    let done = run(server.client().delete_endpoint("7", &DeleteQuery::default())).unwrap();
    assert_eq!((done.deleted.as_slice(), done.errors.len()), ([7].as_slice(), 1));
    server.requests();
}

#[test]
fn release_needs_no_body() {
    let server = once(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec());
    run(server.client().release_ip("10.0.0.1".parse().unwrap())).unwrap();
    server.requests();
}

#[test]
fn api_errors_carry_code_hint_and_retry() {
    let body = json!({"code": "overloaded", "message": "too much", "hint": "wait", "retry_after_ms": 250});
    let server = once(reply("429 Too Many Requests", &body.to_string()));
    let error = run(server.client().config()).unwrap_err();
    assert_eq!(error.to_string(), "too much (wait)");
    assert_eq!((error.code(), error.retry_after()), (Some(ErrorCode::Overloaded), Some(Duration::from_millis(250))));
    assert!(!error.is_unreachable());
    server.requests();
}

#[test]
fn status_of_an_agent_that_does_not_serve_is_a_status() {
    let status = AgentStatus {
        overall: crate::Health::Failing,
        serving: false,
        version: "0.1.0".into(),
        abi_version: 1,
        node_name: "n".into(),
        pid: 1,
        uptime_ms: 1,
        router: vec![],
        kernel: crate::KernelStatus::default(),
        network: crate::NetworkStatus::default(),
        components: vec![],
        controllers: vec![],
        controllers_total: 0,
        controllers_unwell: 0,
        ipam: vec![],
        endpoints: std::collections::BTreeMap::new(),
        stuck: vec![],
        quarantined: vec![],
        deletion_queue: crate::DeletionQueueStatus::default(),
        commands: crate::CommandStatus::default(),
        admission: crate::AdmissionStatus::default(),
        audit_findings: Some(3),
        refused_transitions: 0,
        bpf_maps: vec![],
        prepared: crate::PreparedStatus::default(),
        proxy: crate::ProxyStatus::default(),
        delegate: None,
        resident_bytes: 1,
        from_admin: false,
    };
    let server = once(reply("503 Service Unavailable", &serde_json::to_string(&status).unwrap()));
    assert_eq!(run(server.client().status()).unwrap(), status);
    server.requests();
    let error = json!({"code": "unavailable", "message": "starting", "retry_after_ms": 5});
    let server = once(reply("503 Service Unavailable", &error.to_string()));
    assert_eq!(run(server.client().status()).unwrap_err().code(), Some(ErrorCode::Unavailable));
    server.requests();
}

#[test]
fn hostile_answers_are_errors_that_say_what_is_wrong() {
    let deep = "[".repeat(100_000);
    for (what, answer, words) in [
        ("no HTTP", b"SSH-2.0-OpenSSH\r\n\r\n".to_vec(), "not HTTP"),
        ("binary", vec![0xff; 4096], "not HTTP"),
        ("not JSON", reply("200 OK", "hello"), "not what was asked for"),
        ("other JSON", reply("200 OK", "{\"a\":1}"), "not what was asked for"),
        ("bottomless JSON", reply("200 OK", &deep), "not what was asked for"),
        ("empty", reply("200 OK", ""), "not what was asked for"),
        ("error without body", reply("500 Internal Server Error", ""), "answered 500"),
        ("HTML error", reply("404 Not Found", "<html>"), "<html>"),
        ("redirect", reply("302 Found", ""), "answered 302"),
    ] {
        let server = once(answer);
        let error = run(server.client().ipam()).expect_err(what);
        assert!(matches!(error, ClientError::Protocol { .. }), "{what}: {error:?}");
        assert!(error.to_string().contains(words), "{what}: {error}");
        assert!(error.to_string().contains("GET /v1/ipam"), "{what}: {error}");
        server.requests();
    }
}

#[test]
fn an_answer_cut_short_is_an_agent_that_went_away() {
    for answer in [
        Vec::new(),
        b"HTTP/1.1 200".to_vec(),
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"pools\":[]".to_vec(),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"poo".to_vec(),
    ] {
        let what = String::from_utf8_lossy(&answer).into_owned();
        let server = once(answer);
        let error = run(server.client().ipam()).unwrap_err();
        assert!(matches!(error, ClientError::Closed { .. }), "{what:?}: {error:?}");
        assert!(error.is_unreachable());
        server.requests();
    }
}

#[test]
fn a_declared_length_beyond_the_limit_is_refused_before_it_is_read() {
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n[", MAX_RESPONSE_BYTES + 1);
    let server = once(answer.into_bytes());
    let error = run(server.client().maps()).unwrap_err();
    assert!(error.to_string().contains("longer than"), "{error}");
    server.requests();
}

#[test]
fn an_endless_answer_is_cut_at_the_limit() {
    let server = Server::start(1, |stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        // Until the client closes the connection.
        let mut sent = 0;
        while stream.write_all(&[b' '; 65536]).is_ok() {
            sent += 65536;
            assert!(sent < MAX_RESPONSE_BYTES * 2, "the client reads on beyond its limit");
        }
    });
    let error = run(server.client().maps()).unwrap_err();
    assert!(error.to_string().contains("longer than"), "{error}");
    server.requests();
}

#[test]
fn a_silent_or_dripping_agent_runs_into_the_time_limit() {
    for first in [&b""[..], &b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n["[..]] {
        let server = Server::start(1, move |stream| {
            stream.write_all(first).unwrap();
            assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0);
        });
        let error = run(server.client().with_timeout(Duration::from_millis(50)).maps()).unwrap_err();
        assert_eq!(error.to_string(), "GET /v1/map: no answer from the agent within 50 ms");
        assert!(error.is_unreachable());
        server.requests();
    }
}

#[test]
fn connect_errors_tell_the_cases_apart() {
    let missing = fresh_path();
    let error = run(Client::new(&missing).maps()).unwrap_err();
    assert!(error.is_unreachable());
    assert!(error.to_string().contains("no such socket") && error.to_string().contains("is wharf-agent running"));
    let stale = fresh_path();
    drop(UnixListener::bind(&stale).unwrap());
    let error = run(Client::new(&stale).maps()).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    std::fs::remove_file(&stale).unwrap();
    let error = run(Client::new(format!("/tmp/{}", "a".repeat(200))).maps()).unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error:?}");
}

const EVENT: &str = r#"{"type":"agent","time_unix_ms":1,"endpoint":7,"event":"endpoint-created","message":"made"}"#;

#[test]
fn monitor_gives_lines_as_they_come() {
    let answer = format!("HTTP/1.1 200 OK\r\n\r\n{EVENT}\n\n{{\"type\":\"lost\",\"count\":3}}\n");
    let server = Server::start(1, move |stream| {
        for byte in answer.as_bytes() {
            stream.write_all(&[*byte]).unwrap();
        }
    });
    run(async {
        let mut monitor = server.client().monitor().await.unwrap();
        assert!(matches!(monitor.next().await, Ok(Some(crate::MonitorEvent::Agent(e))) if e.endpoint == Some(7)));
        assert!(matches!(monitor.next().await, Ok(Some(crate::MonitorEvent::Lost { count: 3 }))));
        assert!(matches!(monitor.next().await, Ok(None)));
        assert!(matches!(monitor.next().await, Ok(None)), "asking again after the end is no panic");
    });
    server.requests();
}

#[test]
fn monitor_refuses_what_is_no_event() {
    for (lines, words) in [
        ("garbage\n".to_owned(), "not an event"),
        (EVENT[..20].to_owned(), "in the middle of an event"),
        ("x".repeat(3 << 20), "longer than"),
    ] {
        let server = Server::start(1, move |stream| {
            let answer = format!("HTTP/1.1 200 OK\r\n\r\n{lines}");
            // The client may close the connection first.
            let _ = stream.write_all(answer.as_bytes());
        });
        let error = run(async { server.client().monitor().await.unwrap().next().await }).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        server.requests();
    }
    let server = once(reply("429 Too Many Requests", r#"{"code":"overloaded","message":"too many readers"}"#));
    assert_eq!(run(server.client().monitor()).unwrap_err().code(), Some(ErrorCode::Overloaded));
    server.requests();
}
