//! Whatever comes from outside and is wrong gets a clear error, changes nothing and loses nothing.

use std::{
    fs,
    io::{ErrorKind, Read as _},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use wharf_tests::{
    Attached, NetConf, Node, NodeConfig, Sandbox,
    icmp::ping,
    node::runnable_by_all,
    process::{as_nobody, run},
    scenario,
};

/// A node with one honest container; after `hostile` everything must be as before.
fn unshaken(hostile: impl FnOnce(&Node, &Sandbox, &Attached) -> Result<()>) -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let honest = node.sandbox("honest")?;
        let attached = node.attach(&honest)?;
        let before = (node.endpoints()?, node.ask(async |c| c.ipam().await)?.leases);
        hostile(node, &honest, &attached)?;
        let after = (node.endpoints()?, node.ask(async |c| c.ipam().await)?.leases);
        ensure!(before == after, "{before:#?}\nbecame\n{after:#?}");
        for gateway in attached.gateways()? {
            ping(honest.space()?, gateway)?.must_answer()?;
        }
        let findings = node.audit()?.findings;
        ensure!(findings.is_empty(), "{findings:?}");
        node.detach(&attached)
    })
}

/// Collects what went wrong over many cases, so that one run tells all.
#[derive(Default)]
struct Verdicts(Vec<String>);

impl Verdicts {
    fn expect(&mut self, case: &str, held: bool, seen: impl std::fmt::Debug) {
        if !held {
            self.0.push(format!("{case}: {seen:?}"));
        }
    }

    fn end(self) -> Result<()> {
        ensure!(self.0.is_empty(), "{} cases went wrong:\n{}", self.0.len(), self.0.join("\n"));
        Ok(())
    }
}

#[test]
fn a_malformed_or_hostile_netconf_is_refused_with_its_code() -> Result<()> {
    unshaken(|node, _, _| {
        let sandbox = node.sandbox("victim")?;
        let good = node.netconf();
        let with = |key: &str, value: Value| good.clone().with(key, value).bytes();
        let long = "a".repeat(300);
        let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        let cases: Vec<(&str, Vec<u8>, u32, &str)> = vec![
            ("empty", vec![], 6, ""),
            ("not JSON", b"hello".to_vec(), 6, ""),
            ("half JSON", br#"{"cniVersion":"1.1.0","name""#.to_vec(), 6, ""),
            ("not UTF-8", b"{\"name\":\"\xff\xfe\"}".to_vec(), 6, ""),
            ("deep JSON", deep.into_bytes(), 6, ""),
            ("an array", b"[]".to_vec(), 7, ""),
            ("null", b"null".to_vec(), 7, ""),
            ("two megabytes", with("extra", json!("x".repeat(2 << 20))), 7, ""),
            ("no name", good.clone().without("name").bytes(), 7, "name"),
            ("a name with a slash", with("name", json!("../../etc")), 7, "name"),
            ("a name of 300 bytes", with("name", json!(long)), 7, "name"),
            ("a name that is a number", with("name", json!(7)), 7, "name"),
            ("unknown version", with("cniVersion", json!("9.9.9")), 1, "9.9.9"),
            ("version that is no version", with("cniVersion", json!("latest")), 1, "latest"),
            ("version that is a number", with("cniVersion", json!(1)), 7, "cniVersion"),
            ("socket that is a number", with("socket", json!(5)), 7, "socket"),
            ("relative socket", with("socket", json!("wharf.sock")), 7, "socket"),
            ("no such socket", with("socket", json!("/nowhere/wharf.sock")), 11, "/nowhere/wharf.sock"),
            ("mtu in words", with("mtu", json!("big")), 7, "mtu"),
            ("mtu below IPv6's least", with("mtu", json!(1279)), 7, "mtu"),
            ("mtu above 65535", with("mtu", json!(65_536)), 7, "mtu"),
            ("negative mtu", with("mtu", json!(-1)), 7, "mtu"),
            ("mtu beyond 64 bits", with("mtu", json!(1e30)), 7, "mtu"),
            ("unknown pool", with("pool", json!("atlantis")), 7, "atlantis"),
            ("pool that is a path", with("pool", json!("../default")), 7, "pool"),
            ("unknown log level", with("log-level", json!("shout")), 7, "log-level"),
            ("runtimeConfig in words", with("runtimeConfig", json!("x")), 7, "runtimeConfig"),
            ("negative rate", with("runtimeConfig", json!({"bandwidth": {"egressRate": -1}})), 7, "egressRate"),
            ("burst without rate", with("runtimeConfig", json!({"bandwidth": {"egressBurst": 8}})), 7, "egressRate"),
            (
                "burst above 4 GiB",
                with("runtimeConfig", json!({"bandwidth": {"egressRate": 8, "egressBurst": 34_359_738_369_u64}})),
                7,
                "4 GiB",
            ),
            ("MAC in words", with("runtimeConfig", json!({"mac": "my-mac"})), 7, "mac"),
            ("multicast MAC", with("runtimeConfig", json!({"mac": "01:00:5e:00:00:01"})), 7, "MAC"),
            ("IP in words", with("runtimeConfig", json!({"ips": ["tomorrow"]})), 7, "ips"),
            ("IP outside the pool", with("runtimeConfig", json!({"ips": ["192.0.2.1"]})), 7, "192.0.2.1"),
            ("two IPv4 addresses", with("runtimeConfig", json!({"ips": ["10.87.0.200", "10.87.0.201"]})), 7, "address"),
            ("the node's own address", with("runtimeConfig", json!({"ips": ["10.87.0.1"]})), 4, "10.87.0.1"),
            ("prevResult at ADD", with("prevResult", json!({"cniVersion": "1.1.0"})), 7, "prevResult"),
        ];
        let mut verdicts = Verdicts::default();
        for (case, stdin, code, word) in cases {
            let answer = node.cni("ADD").of("victim", sandbox.path(), "eth0").stdin(&stdin).run()?;
            match answer.failure() {
                Ok(f) => verdicts.expect(case, f.code == code && f.text().contains(word) && f.text().len() < 2000, &f),
                Err(error) => verdicts.expect(case, false, format!("{error:#}")),
            }
            verdicts.expect(case, sandbox.space()?.links()? == ["lo"], "an interface was made");
        }
        verdicts.end()
    })
}

#[test]
fn a_hostile_environment_is_refused_with_code_4() -> Result<()> {
    unshaken(|node, _, _| {
        let sandbox = node.sandbox("victim")?;
        let netns = sandbox.path().display().to_string();
        let long = "a".repeat(300);
        let cases: Vec<(&str, [&str; 4], &str)> = vec![
            ("no such command", ["EXPLODE", "c1", &netns, "eth0"], "CNI_COMMAND"),
            ("no command", ["", "c1", &netns, "eth0"], "CNI_COMMAND"),
            ("empty container id", ["ADD", "", &netns, "eth0"], "CNI_CONTAINERID"),
            ("container id with a slash", ["ADD", "../c1", &netns, "eth0"], "CNI_CONTAINERID"),
            ("container id with a leading dot", ["ADD", ".c1", &netns, "eth0"], "CNI_CONTAINERID"),
            ("container id with a newline", ["ADD", "c1\nx", &netns, "eth0"], "CNI_CONTAINERID"),
            ("container id of 300 bytes", ["ADD", &long, &netns, "eth0"], "CNI_CONTAINERID"),
            ("empty interface name", ["ADD", "c1", &netns, ""], "CNI_IFNAME"),
            ("interface name of 16 bytes", ["ADD", "c1", &netns, "abcdefghijklmnop"], "CNI_IFNAME"),
            ("interface name '.'", ["ADD", "c1", &netns, "."], "CNI_IFNAME"),
            ("interface name '..'", ["ADD", "c1", &netns, ".."], "CNI_IFNAME"),
            ("interface name with a slash", ["ADD", "c1", &netns, "a/b"], "CNI_IFNAME"),
            ("interface name with a colon", ["ADD", "c1", &netns, "eth0:1"], "CNI_IFNAME"),
            ("interface name with a blank", ["ADD", "c1", &netns, "eth 0"], "CNI_IFNAME"),
            ("empty namespace", ["ADD", "c1", "", "eth0"], "CNI_NETNS"),
            ("relative namespace", ["ADD", "c1", "netns/c1", "eth0"], "CNI_NETNS"),
            ("DEL without container id", ["DEL", "", &netns, "eth0"], "CNI_CONTAINERID"),
            ("CHECK without namespace", ["CHECK", "c1", "", "eth0"], "CNI_NETNS"),
        ];
        let mut verdicts = Verdicts::default();
        for (case, [command, container, netns, ifname], word) in cases {
            let call = node.cni(command).conf(&node.netconf());
            let call = call.env("CNI_CONTAINERID", container).env("CNI_NETNS", netns).env("CNI_IFNAME", ifname);
            match call.run()?.failure() {
                Ok(f) => verdicts.expect(case, f.code == 4 && f.text().contains(word), &f),
                Err(error) => verdicts.expect(case, false, format!("{error:#}")),
            }
        }
        // What is no endpoint's number may be the beginning of a container id: here of none.
        for target in ["/v1/endpoint/0", "/v1/endpoint/16384", "/v1/endpoint/-1", "/v1/endpoint/wh00070000002a"] {
            let answer = node.http("GET", target, None)?;
            let held = answer.status == 404 && answer.code().as_deref().is_ok_and(|c| c == "not-found");
            verdicts.expect(target, held, (answer.status, answer.text()));
        }
        verdicts.expect("victim", sandbox.space()?.links()? == ["lo"], sandbox.space()?.links()?);
        let fifteen = node.attach_with(&sandbox, "abcdefghijklmno", &node.netconf());
        let fifteen = fifteen.context("an interface name of 15 bytes is a good one")?;
        node.detach(&fifteen)?;
        verdicts.end()
    })
}

#[test]
fn a_path_that_is_no_container_namespace_is_refused() -> Result<()> {
    unshaken(|node, _, _| {
        let dir = node.dirs().root.join("paths");
        fs::create_dir(&dir)?;
        let path = |name: &str| dir.join(name);
        fs::write(path("file"), "x")?;
        fs::create_dir(path("directory"))?;
        nix::unistd::mkfifo(&path("fifo"), nix::sys::stat::Mode::S_IRWXU).context("make a FIFO")?;
        node.space().bind(&path("node"))?;
        let gone = {
            let mut sandbox = node.sandbox("gone")?;
            sandbox.vanish()?;
            sandbox.path().to_owned()
        };
        std::os::unix::fs::symlink(path("file"), path("link"))?;
        std::os::unix::fs::symlink(path("loop"), path("loop"))?;
        let cases: Vec<(&str, PathBuf)> = vec![
            ("a path that never was", path("nothing")),
            ("a namespace that is gone", gone),
            ("a file", path("file")),
            ("a link to a file", path("link")),
            ("a directory", path("directory")),
            ("a FIFO, which would hang who opens it", path("fifo")),
            ("a device", "/dev/null".into()),
            ("another kind of namespace", "/proc/self/ns/mnt".into()),
            ("the node's own namespace", path("node")),
            ("the agent's own namespace", format!("/proc/{}/ns/net", node.agent_pid()?).into()),
            ("a link to itself", path("loop")),
            ("a path through a file", path("file/x")),
            ("a path with a name of 300 bytes", path(&"a".repeat(300))),
            ("a path of 5000 bytes", format!("/{}", "a/".repeat(2500)).into()),
        ];
        let mut verdicts = Verdicts::default();
        for (case, netns) in cases {
            match node.cni("ADD").of("victim", &netns, "eth0").conf(&node.netconf()).run()?.failure() {
                Ok(f) => verdicts.expect(case, f.code == 4 && f.text().contains("CNI_NETNS"), &f),
                Err(error) => verdicts.expect(case, false, format!("{error:#}")),
            }
        }
        verdicts.end()
    })
}

#[test]
fn a_hostile_rest_body_is_answered_with_400() -> Result<()> {
    unshaken(|node, honest, attached| {
        let target = "/v1/endpoint/cni-attachment-id:victim:eth0";
        let sandbox = node.sandbox("victim")?;
        let good = json!({"container_id": "victim", "ifname": "eth0", "network": "harbour", "netns": sandbox.path()});
        let with = |key: &str, value: Value| {
            let mut body = good.clone();
            body[key] = value;
            body.to_string()
        };
        let puts: Vec<(&str, String, &str)> = vec![
            ("empty body", String::new(), "body"),
            ("not JSON", "{".into(), "body"),
            ("an array", "[]".into(), "body"),
            ("missing fields", "{}".into(), "container_id"),
            ("unknown field", with("colour", json!("blue")), "colour"),
            ("wrong type", with("mtu", json!("1500")), "mtu"),
            ("container id of another", with("container_id", json!("other")), "another"),
            ("container id with a slash", with("container_id", json!("a/b")), "container id"),
            ("interface name of 16 bytes", with("ifname", json!("abcdefghijklmnop")), "interface name"),
            ("network with a blank", with("network", json!("a b")), "network"),
            ("relative namespace", with("netns", json!("x")), "netns"),
            ("namespace with a NUL", with("netns", json!("/x\u{0}y")), "netns"),
            ("mtu too small", with("mtu", json!(100)), "mtu"),
            ("mtu too large", with("mtu", json!(70_000)), "mtu"),
            ("burst without rate", with("bandwidth", json!({"ingress": {"rate": 0, "burst": 8}})), "burst"),
            ("MAC in words", with("mac", json!("x")), "MAC"),
            ("IP in words", with("ips", json!(["x"])), "ip"),
            ("three IPs", with("ips", json!(["10.87.0.9", "10.87.0.10", "fd57:4a7f:e8f::9"])), "one address of each"),
            ("IP outside the pool", with("ips", json!(["192.0.2.9"])), "192.0.2.9"),
            ("unknown pool", with("pool", json!("atlantis")), "atlantis"),
            ("label without source", with("labels", json!(["x"])), "label"),
            ("label with a newline", with("labels", json!(["k8s:a=b\nc"])), "label"),
            (
                "257 labels",
                with("labels", json!((0..257).map(|n| format!("k8s:l{n}=x")).collect::<Vec<_>>())),
                "labels",
            ),
            ("pod name with an escape", with("pod_name", json!("a\u{1b}[2J")), "pod_name"),
        ];
        let mut verdicts = Verdicts::default();
        for (case, body, word) in puts {
            let answer = node.http("PUT", target, Some(&body))?;
            let text = answer.text();
            let shown = (answer.status, &text);
            verdicts.expect(case, answer.status == 400 && text.contains(word) && answer.code().is_ok(), shown);
        }
        let id = node.endpoint(attached)?.id;
        let others: Vec<(&str, &str, String, Option<&str>)> = vec![
            ("unknown prefix", "GET", "/v1/endpoint/name:x".into(), None),
            ("an id that climbs", "GET", "/v1/endpoint/..%2f..%2fetc%2fpasswd".into(), None),
            ("an id that is not UTF-8", "GET", "/v1/endpoint/%ff%fe".into(), None),
            ("unknown filter", "GET", "/v1/endpoint?colour=blue".into(), None),
            ("unknown state", "GET", "/v1/endpoint?state=happy".into(), None),
            ("delete of everything", "DELETE", "/v1/endpoint".into(), None),
            ("delete with an unknown query", "DELETE", format!("/v1/endpoint/{id}?force=true"), None),
            ("delete with a bad epoch", "DELETE", format!("/v1/endpoint/{id}?epoch=-1"), None),
            ("patch of an unknown field", "PATCH", format!("/v1/endpoint/{id}"), Some(r#"{"ipv4":"10.0.0.1"}"#)),
            ("unknown level", "PATCH", format!("/v1/endpoint/{id}"), Some(r#"{"regenerate":"everything"}"#)),
            ("bad label", "PATCH", format!("/v1/endpoint/{id}"), Some(r#"{"labels":["nonsense"]}"#)),
            ("unknown setting", "PATCH", "/v1/config".into(), Some(r#"{"mtu":9000}"#)),
            ("bad log level", "PATCH", "/v1/config".into(), Some(r#"{"log_level":"=[=["}"#)),
            ("lease without owner", "POST", "/v1/ipam".into(), Some("{}")),
            ("lease of a family that is none", "POST", "/v1/ipam".into(), Some(r#"{"owner":"x","family":"ipx"}"#)),
            ("lease from no pool", "POST", "/v1/ipam".into(), Some(r#"{"owner":"x","pool":"atlantis"}"#)),
            ("lease for a control character", "POST", "/v1/ipam".into(), Some(r#"{"owner":"a\u0007b"}"#)),
            ("release of words", "DELETE", "/v1/ipam/tomorrow".into(), None),
            ("gc of no network", "POST", "/v1/gc".into(), Some(r#"{"network":"a/b","valid":[]}"#)),
            ("gc without list", "POST", "/v1/gc".into(), Some(r#"{"network":"harbour"}"#)),
        ];
        for (case, method, target, body) in others {
            let answer = node.http(method, &target, body)?;
            let code = answer.code();
            let held = answer.status == 400 && code.as_deref().is_ok_and(|c| c == "invalid-request");
            verdicts.expect(case, held, (answer.status, answer.text()));
        }
        verdicts.expect("victim", sandbox.space()?.links()? == ["lo"], sandbox.space()?.links()?);
        verdicts.expect("honest", honest.space()?.links()?.contains(&"eth0".to_owned()), honest.space()?.links()?);
        verdicts.end()
    })
}

#[test]
fn bytes_that_are_not_http_do_not_hurt_the_agent() -> Result<()> {
    unshaken(|node, _, _| {
        let socket = node.dirs().socket();
        let huge = vec![b'a'; 4 << 20];
        let many_headers =
            [b"GET /v1/healthz HTTP/1.1\r\n".as_slice(), &b"X-A: b\r\n".repeat(10_000), b"\r\n"].concat();
        let lies = b"PUT /v1/endpoint/7 HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n".to_vec();
        let smuggled =
            b"POST /v1/gc HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nzzzz\r\n"
                .to_vec();
        for bytes in [b"\0\0\0\0\r\n\r\n".to_vec(), huge, many_headers, lies, smuggled] {
            if let Ok(answer) = wharf_tests::http::raw(&socket, &bytes) {
                ensure!((400..500).contains(&answer.status), "{}: {}", answer.status, answer.text());
            }
        }
        let body = format!(r#"{{"owner":"{}"}}"#, "x".repeat(3 << 20));
        let answer = node.http("POST", "/v1/ipam", Some(&body))?;
        ensure!((400..500).contains(&answer.status), "{}", answer.status);
        ensure!(node.http("GET", "/v1/healthz", None)?.status == 200);
        Ok(())
    })
}

/// True unless the other end closed the connection, on which it says nothing.
fn is_open(mut stream: &std::os::unix::net::UnixStream) -> bool {
    stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn clients_that_say_nothing_do_not_keep_others_from_being_served() -> Result<()> {
    unshaken(|node, _, _| {
        let silent: Vec<_> = (0..200)
            .map(|_| std::os::unix::net::UnixStream::connect(node.dirs().socket()))
            .collect::<Result<_, _>>()
            .context("connect")?;
        let sandbox = node.sandbox("late")?;
        let attached = node.attach(&sandbox)?;
        // The agent closes a connection that says nothing for too long. Had the ADD waited its turn behind these, the
        // agent would have closed them before.
        for stream in &silent {
            stream.set_nonblocking(true)?;
        }
        let open = silent.iter().filter(|stream| is_open(stream)).count();
        ensure!(
            open == silent.len(),
            "{open} of {} silent connections were open when the ADD was answered",
            silent.len()
        );
        node.detach(&attached)
    })
}

#[test]
fn without_root_the_socket_is_closed_to_strangers() -> Result<()> {
    unshaken(|node, _, _| {
        let mut command = node.command(runnable_by_all("wharf")?)?;
        as_nobody(command.arg("--socket").arg(node.dirs().socket()).args(["status", "--brief"]));
        let finished = run(command, b"", Duration::from_secs(10))?;
        ensure!(finished.code() == 2 && finished.stdout == "no-permission\n", "{}", finished.describe());
        ensure!(!finished.stderr.contains("systemctl") && finished.stderr.contains("group"), "{}", finished.describe());
        Ok(())
    })
}

#[test]
fn a_netconf_of_the_least_keys_is_enough() -> Result<()> {
    scenario(NodeConfig::default(), |node| {
        let sandbox = node.sandbox("a")?;
        let least = NetConf::new(&node.dirs().socket());
        let attached = node.attach_with(&sandbox, "eth0", &least)?;
        let noisy = node.netconf().with("ipMasq", json!(true)).with("capabilities", json!({"portMappings": true}));
        let second = node.sandbox("b")?;
        let tolerated = node.attach_with(&second, "eth0", &noisy).context("keys that are not ours")?;
        node.detach(&tolerated)?;
        node.detach(&attached)
    })
}
