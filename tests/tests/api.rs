//! Every route of the REST API and the status codes it answers with.

use std::{
    io::{Read as _, Write as _},
    os::unix::{
        fs::{FileTypeExt, PermissionsExt},
        net::UnixStream,
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use wharf_tests::{Attached, Node, NodeConfig, Sandbox, http::Response, scenario, wait};

struct Scene {
    a: Sandbox,
    ea: Attached,
    id: u16,
}

fn with_one(body: impl FnOnce(&mut Node, &Scene) -> Result<()>) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let ea = node.attach(&a)?;
        let id = node.endpoint(&ea)?.id;
        let scene = Scene { a, ea, id };
        body(node, &scene)?;
        node.detach(&scene.ea)
    })
}

fn answers(node: &Node, method: &str, target: &str, body: Option<Value>, status: u16) -> Result<Response> {
    let answer = node.http(method, target, body.map(|b| b.to_string()).as_deref())?;
    ensure!(answer.status == status, "{method} {target}: {} instead of {status}: {}", answer.status, answer.text());
    if status >= 400 {
        let error = answer.json()?;
        ensure!(error["code"].is_string() && error["message"].as_str().is_some_and(|m| !m.is_empty()), "{error}");
    }
    Ok(answer)
}

#[test]
fn every_get_answers_200_with_its_body() -> Result<()> {
    with_one(|node, s| {
        let id = s.id;
        // Pending until the first collection of flows.
        let status = wait::until("a known status", || {
            let status = answers(node, "GET", "/v1/healthz", None, 200)?.json()?;
            Ok((status["overall"] != "pending").then_some(status))
        })?;
        ensure!(status["serving"] == true && status["overall"] == "ok", "{status}");
        ensure!(status["endpoints"]["ready"] == 1 && status["node_name"] == "quay", "{status}");
        let config = answers(node, "GET", "/v1/config", None, 200)?.json()?;
        ensure!(config["effective"]["run-dir"] == json!(node.dirs().run), "{config}");
        let list = answers(node, "GET", "/v1/endpoint", None, 200)?.json()?;
        ensure!(list.as_array().is_some_and(|l| l.len() == 1), "{list}");
        let one = answers(node, "GET", &format!("/v1/endpoint/{id}"), None, 200)?.json()?;
        ensure!(one == list[0], "{one} against {list}");
        let log = answers(node, "GET", &format!("/v1/endpoint/{id}/log"), None, 200)?.json()?;
        ensure!(log.as_array().is_some_and(|l| l.iter().any(|e| e["state"] == "ready")), "{log}");
        let health = answers(node, "GET", &format!("/v1/endpoint/{id}/healthz"), None, 200)?.json()?;
        ensure!(health["overall"] == "ok" && health["findings"] == json!([]), "{health}");
        let labels = answers(node, "GET", &format!("/v1/endpoint/{id}/labels"), None, 200)?.json()?;
        ensure!(labels["identity"] == one["identity"], "{labels}");
        let config = answers(node, "GET", &format!("/v1/endpoint/{id}/config"), None, 200)?.json()?;
        ensure!(config["desired"]["ipv4"] == json!(s.ea.v4()?), "{config}");
        ensure!(config["realized"]["ipv4"] == json!(s.ea.v4()?), "{config}");
        let ipam = answers(node, "GET", "/v1/ipam", None, 200)?.json()?;
        ensure!(
            ipam["leases"].as_array().is_some_and(|l| l.iter().any(|x| x["ip"] == json!(s.ea.v6().ok()))),
            "{ipam}"
        );
        let maps = answers(node, "GET", "/v1/map", None, 200)?.json()?;
        for name in [
            "ENDPOINTS".to_owned(),
            "CALLS".to_owned(),
            "EVENTS".to_owned(),
            format!("{id}/CONFIG"),
            format!("{id}/METRICS"),
            format!("{id}/BANDWIDTH"),
        ] {
            ensure!(maps.as_array().is_some_and(|m| m.iter().any(|m| m["name"] == json!(name))), "no {name} in {maps}");
        }
        let rows = answers(node, "GET", "/v1/map/ENDPOINTS", None, 200)?.json()?;
        ensure!(rows["rows"].as_array().is_some_and(|r| r.len() == 2) && rows["map"]["entries"] == 2, "{rows}");
        for form in [format!("/v1/map/{id}.CONFIG"), format!("/v1/map/{id}%2FCONFIG")] {
            answers(node, "GET", &form, None, 200)?;
        }
        let proxy = answers(node, "GET", "/v1/proxy", None, 200)?.json()?;
        ensure!(proxy["state"] == "absent" && proxy["listeners"] == json!([]), "{proxy}");
        let metrics = answers(node, "GET", "/v1/metrics", None, 200)?.json()?;
        ensure!(metrics.is_array(), "{metrics}");
        let audit = answers(node, "GET", "/v1/audit", None, 200)?.json()?;
        ensure!(audit["findings"] == json!([]) && audit["examined"]["endpoints"] == 1, "{audit}");
        let prometheus = answers(node, "GET", "/metrics", None, 200)?;
        ensure!(prometheus.text().contains("# TYPE"), "{}", prometheus.text());
        Ok(())
    })
}

#[test]
fn each_form_of_an_id_finds_the_endpoint() -> Result<()> {
    with_one(|node, s| {
        let forms = [
            s.id.to_string(),
            "container-id:a".into(),
            "cni-attachment-id:a:eth0".into(),
            format!("ipv4:{}", s.ea.v4()?),
            format!("ipv6:{}", s.ea.v6()?),
        ];
        for form in forms {
            let found = answers(node, "GET", &format!("/v1/endpoint/{form}"), None, 200)?.json()?;
            ensure!(found["id"] == s.id, "{form}: {found}");
        }
        let second = node.attach_with(&s.a, "eth1", &node.netconf())?;
        let answer = answers(node, "GET", "/v1/endpoint/container-id:a", None, 409)?;
        ensure!(answer.text().contains("cni-attachment-id"), "{}", answer.text());
        node.detach(&second)
    })
}

#[test]
fn filters_choose_endpoints() -> Result<()> {
    with_one(|node, s| {
        let b = node.sandbox("b")?;
        let eb = node.attach_with(&b, "eth0", &node.netconf().with("name", json!("annex")))?;
        let cases = [
            ("container-id=a", 1),
            ("container-id=nobody", 0),
            ("network=annex", 1),
            ("state=ready", 2),
            ("state=restoring", 0),
            ("state=ready&network=harbour", 1),
            ("pod-name=none", 0),
        ];
        for (query, count) in cases {
            let list = answers(node, "GET", &format!("/v1/endpoint?{query}"), None, 200)?.json()?;
            ensure!(list.as_array().map(Vec::len) == Some(count), "{query}: {list}");
        }
        let label = json!({"labels": ["k8s:app=web"]});
        answers(node, "PATCH", &format!("/v1/endpoint/{}", s.id), Some(label), 200)?;
        let list = answers(node, "GET", "/v1/endpoint?label=k8s:app%3Dweb", None, 200)?.json()?;
        ensure!(list[0]["id"] == s.id && list.as_array().map(Vec::len) == Some(1), "{list}");
        node.detach(&eb)
    })
}

#[test]
fn put_answers_201_400_409_and_429() -> Result<()> {
    let small = NodeConfig::default().flags(&["--ipv4-pool", "10.99.0.0/30"]);
    scenario(small, |node| {
        let (a, b) = (node.sandbox("a")?, node.sandbox("b")?);
        let body = |s: &Sandbox| json!({"container_id": s.name(), "ifname": "eth0", "network": "n", "netns": s.path()});
        let target = |s: &Sandbox| format!("/v1/endpoint/cni-attachment-id:{}:eth0", s.name());
        let made = answers(node, "PUT", &target(&a), Some(body(&a)), 201)?.json()?;
        ensure!(made["state"] == "ready" && made["ipv4"].is_string() && made["ipv6"].is_string(), "{made}");
        let twice = answers(node, "PUT", &target(&a), Some(body(&a)), 409)?;
        ensure!(twice.code()? == "exists", "{}", twice.text());
        let full = answers(node, "PUT", &target(&b), Some(body(&b)), 429)?;
        ensure!(full.code()? == "pool-exhausted", "{}", full.text());
        let mut gone = body(&b);
        gone["netns"] = json!("/nowhere");
        let no_netns = answers(node, "PUT", &target(&b), Some(gone), 400)?;
        ensure!(no_netns.code()? == "invalid-netns", "{}", no_netns.text());
        answers(node, "PUT", "/v1/endpoint/7", Some(body(&b)), 400)?;
        answers(node, "DELETE", &target(&a), None, 200)?;
        Ok(())
    })
}

#[test]
fn a_create_whose_deadline_has_passed_is_undone() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let body = json!({"container_id": "a", "ifname": "eth0", "network": "n", "netns": a.path(), "deadline_ms": 0});
        let late = answers(node, "PUT", "/v1/endpoint/cni-attachment-id:a:eth0", Some(body), 503)?;
        ensure!(late.code()? == "deadline-exceeded", "{}", late.text());
        ensure!(a.space()?.links()? == ["lo"] && node.endpoints()?.is_empty());
        Ok(())
    })
}

#[test]
fn delete_answers_200_then_404() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let a = node.sandbox("a")?;
        let id = |e: &Attached| -> Result<u16> { Ok(node.endpoint(e)?.id) };
        let first = id(&node.attach(&a)?)?;
        let done = answers(node, "DELETE", &format!("/v1/endpoint/{first}"), None, 200)?.json()?;
        ensure!(done["deleted"] == json!([first]) && done["errors"] == json!([]), "{done}");
        let again = answers(node, "DELETE", &format!("/v1/endpoint/{first}"), None, 404)?;
        ensure!(again.code()? == "not-found", "{}", again.text());
        node.attach(&a)?;
        answers(node, "DELETE", "/v1/endpoint?container-id=a", None, 200)?;
        answers(node, "DELETE", "/v1/endpoint?container-id=a", None, 404)?;
        Ok(())
    })
}

#[test]
fn what_is_not_there_is_404_and_what_cannot_be_done_405() -> Result<()> {
    with_one(|node, s| {
        for target in [
            "/v1/endpoint/9999",
            "/v1/endpoint/container-id:nobody",
            "/v1/endpoint/9999/log",
            "/v1/endpoint/ipv4:192.0.2.1/healthz",
            "/v1/map/NOTHING",
            "/v1/map/9999.CONFIG",
            "/v2/healthz",
            "/",
        ] {
            answers(node, "GET", target, None, 404)?;
        }
        answers(node, "PATCH", "/v1/endpoint/9999", Some(json!({"trace": true})), 404)?;
        for (method, target) in [("POST", "/v1/endpoint"), ("DELETE", "/v1/healthz"), ("PUT", "/v1/ipam")] {
            let answer = node.http(method, target, None)?;
            ensure!(answer.status == 405, "{method} {target}: {}", answer.status);
        }
        ensure!(node.endpoint(&s.ea)?.id == s.id);
        Ok(())
    })
}

#[test]
fn addresses_are_leased_shown_and_given_back() -> Result<()> {
    with_one(|node, s| {
        let leases = answers(node, "POST", "/v1/ipam", Some(json!({"owner": "me"})), 201)?.json()?;
        ensure!(leases["leases"].as_array().map(Vec::len) == Some(2), "{leases}");
        let shown = answers(node, "GET", "/v1/ipam", None, 200)?.text();
        for lease in leases["leases"].as_array().context("leases")? {
            let ip = lease["ip"].as_str().context("ip")?;
            ensure!(shown.contains(ip), "{ip} is not shown");
            let taken = node.ask(async |c| c.allocate_exact(ip.parse().unwrap_or([0, 0, 0, 0].into()), "you").await);
            ensure!(taken.is_err_and(|e| format!("{e:#}").contains("me")), "{ip} was given out twice");
            answers(node, "DELETE", &format!("/v1/ipam/{ip}"), None, 200)?;
            answers(node, "DELETE", &format!("/v1/ipam/{ip}"), None, 200).context("once more")?;
        }
        let exact = node.ask(async |c| c.allocate_exact([10, 87, 77, 7].into(), "me").await)?;
        ensure!(exact.leases.len() == 1 && exact.leases[0].owner.contains("me"), "{exact:?}");
        node.ask(async |c| c.release_ip([10, 87, 77, 7].into()).await)?;
        let only6 = answers(node, "POST", "/v1/ipam", Some(json!({"owner": "me", "family": "ipv6"})), 201)?.json()?;
        let ip = only6["leases"][0]["ip"].as_str().context("ip")?;
        ensure!(ip.contains(':') && only6["leases"].as_array().map(Vec::len) == Some(1), "{only6}");
        answers(node, "DELETE", &format!("/v1/ipam/{ip}"), None, 200)?;
        answers(node, "DELETE", "/v1/ipam/192.0.2.1", None, 404).context("an address of no pool")?;
        answers(node, "DELETE", &format!("/v1/ipam/{}", s.ea.v4()?), None, 409).context("an endpoint's address")?;
        answers(node, "DELETE", &format!("/v1/ipam/{}", s.ea.gateways()?[0]), None, 409)
            .context("the node's address")?;
        Ok(())
    })
}

#[test]
fn settings_that_can_change_change_and_show() -> Result<()> {
    with_one(|node, s| {
        let patched =
            answers(node, "PATCH", "/v1/config", Some(json!({"log_level": "debug", "trace": true})), 200)?.json()?;
        ensure!(patched["effective"]["trace"] == "true" && patched["effective"]["log-level"] == "debug", "{patched}");
        let config = answers(node, "GET", &format!("/v1/endpoint/{}/config", s.id), None, 200)?.json()?;
        ensure!(config["desired"]["trace"] == "true", "{config}");
        answers(node, "PATCH", "/v1/config", Some(json!({"log_level": "info", "trace": false})), 200)?;
        Ok(())
    })
}

#[test]
fn an_agent_that_serves_has_a_socket_for_root_and_its_group_only() -> Result<()> {
    with_one(|node, _| {
        let meta = std::fs::metadata(node.dirs().socket())?;
        ensure!(
            meta.file_type().is_socket() && meta.permissions().mode() & 0o777 == 0o660,
            "{:o}",
            meta.permissions().mode()
        );
        Ok(())
    })
}

#[test]
fn the_document_served_is_the_one_checked_in() -> Result<()> {
    with_one(|node, _| {
        let served = answers(node, "GET", "/v1/openapi.json", None, 200)?.json()?;
        // As it was when this test was built: where it runs there may be no checkout.
        let kept: Value = serde_json::from_str(include_str!("../../crates/api/openapi.json"))?;
        ensure!(served == kept, "crates/api/openapi.json is stale");
        let paths = served["paths"].as_object().context("paths")?;
        for path in [
            "/v1/healthz",
            "/v1/config",
            "/v1/endpoint",
            "/v1/endpoint/{id}",
            "/v1/endpoint/{id}/log",
            "/v1/ipam",
            "/v1/ipam/{ip}",
            "/v1/map",
            "/v1/map/{name}",
        ] {
            ensure!(paths.contains_key(path), "{path} is not in the document");
        }
        Ok(())
    })
}

#[test]
fn metrics_are_on_a_tcp_port_when_asked_for_and_nothing_else_is() -> Result<()> {
    let config = NodeConfig::default().flags(&["--metrics-listen", "127.0.0.1:9478"]);
    scenario(config, |node| {
        let get = |path: &str| -> Result<String> {
            node.space().run(|| {
                use std::io::{Read, Write};
                let mut stream = std::net::TcpStream::connect("127.0.0.1:9478")?;
                write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
                let mut text = String::new();
                stream.read_to_string(&mut text)?;
                Ok(text)
            })?
        };
        let text = get("/metrics")?;
        ensure!(text.starts_with("HTTP/1.1 200") && text.contains("# TYPE"), "{text}");
        for path in ["/v1/endpoint", "/v1/healthz", "/v1/config"] {
            let text = get(path)?;
            ensure!(text.starts_with("HTTP/1.1 404"), "{path} over TCP: {text}");
        }
        Ok(())
    })
}

/// Connections to the agent of a user that is not root.
fn of_nobody(node: &Node, count: usize) -> Result<Vec<UnixStream>> {
    let socket = node.dirs().socket();
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o666))?;
    // A directory above the run directory may be closed to other users: the thread enters it before it changes its
    // user.
    let connect = || {
        unshare(CloneFlags::CLONE_FS)?;
        std::env::set_current_dir(socket.parent().context("no directory")?)?;
        // SAFETY: the system call takes three integers. It changes the user of this thread, which ends after the
        // closure.
        let result = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65_534, -1) };
        ensure!(result == 0, "become nobody");
        let name = socket.file_name().context("no name")?;
        (0..count).map(|_| UnixStream::connect(name).context("connect")).collect::<Result<Vec<_>>>()
    };
    node.space().run(connect)?
}

#[test]
fn members_of_the_group_leave_places_and_memory_to_root() -> Result<()> {
    with_one(|node, _| {
        let began = Instant::now();
        // More than the agent has places for.
        let idle = of_nobody(node, 1_100)?;
        let other = node.sandbox("b")?;
        let attached = node.attach(&other)?;
        node.detach(&attached)?;
        let [mut late] = <[UnixStream; 1]>::try_from(of_nobody(node, 1)?).ok().context("one")?;
        write!(late, "GET /v1/config HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        late.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        // An idle connection loses its place after 10 s.
        ensure!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
        drop(idle);
        // Two of the three bodies fit.
        let part = vec![b' '; 7 << 20];
        let mut slow = of_nobody(node, 3)?;
        for (n, stream) in slow.iter_mut().enumerate() {
            let length = if n == 2 { part.len() } else { part.len() + 1 };
            write!(stream, "PUT /v1/policy HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n")?;
            stream.write_all(&part)?;
        }
        let mut answer = [0; 512];
        let length = slow.last_mut().context("three")?.read(&mut answer)?;
        let answer = String::from_utf8_lossy(answer.get(..length).unwrap_or_default()).to_lowercase();
        ensure!(answer.starts_with("http/1.1 429") && answer.contains("retry-after: 1"), "{answer}");
        answers(node, "PATCH", "/v1/config", Some(json!({"trace": false})), 200).map(drop)
    })
}
