use std::os::unix::ffi::OsStringExt;

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn env(command: &str) -> Env {
    Env {
        command: Some(command.into()),
        container_id: Some("c1".into()),
        netns: Some("/run/netns/c1".into()),
        ifname: Some("eth0".into()),
        args: None,
        runtime: None,
        path: Some("/opt/cni/bin".into()),
    }
}

fn read(env: &Env, stdin: &str) -> Result<Request, Failure> {
    Request::read(env, &mut stdin.as_bytes())
}

fn conf(keys: Value) -> String {
    let mut document = json!({"cniVersion": "1.1.0", "name": "net", "type": "wharf-cni"});
    for (key, value) in keys.as_object().unwrap() {
        document[key] = value.clone();
    }
    document.to_string()
}

fn command(env: &Env, keys: Value) -> Command {
    match read(env, &conf(keys)) {
        Ok(Request::Ask(ask)) => ask.command,
        other => panic!("not a command for the agent: {other:?}"),
    }
}

fn refused(env: &Env, keys: Value) -> Fault {
    read(env, &conf(keys)).unwrap_err().fault
}

struct Untouchable;
impl Read for Untouchable {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        panic!("stdin was read")
    }
}

struct Broken;
impl Read for Broken {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        Err(std::io::Error::other("unplugged"))
    }
}

#[test]
fn add_takes_everything() {
    let env = Env { args: Some("K8S_POD_NAME=web".into()), ..env("ADD") };
    match command(&env, json!({"mtu": 1400})) {
        Command::Add { target, netns, args, .. } => {
            assert_eq!(target, Target { container_id: "c1".into(), ifname: "eth0".into() });
            assert_eq!((netns.as_str(), args.pod_name.as_deref()), ("/run/netns/c1", Some("web")));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_command_that_is_unknown_or_missing_is_refused_before_stdin_is_read() {
    for command in [None, Some(""), Some("add"), Some("UPDATE")] {
        let env = Env { command: command.map(Into::into), ..env("") };
        let failure = Request::read(&env, &mut Untouchable).unwrap_err();
        assert_eq!(failure.fault.code, Code::Environment);
        assert!(failure.fault.msg.contains("CNI_COMMAND"));
    }
}

#[test]
fn all_missing_variables_are_named_at_once() {
    let env = Env { command: Some("ADD".into()), ..Env::default() };
    let fault = Request::read(&env, &mut Untouchable).unwrap_err().fault;
    assert_eq!(fault.code, Code::Environment);
    for name in ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS"] {
        assert!(fault.msg.contains(name), "{}", fault.msg);
    }
}

#[test]
fn bad_variables_are_refused_with_their_rule() {
    let not_utf8 = OsString::from_vec(vec![b'a', 0xff]);
    for (env, name) in [
        (Env { container_id: Some("-c".into()), ..env("ADD") }, "CNI_CONTAINERID"),
        (Env { container_id: Some("a/b".into()), ..env("ADD") }, "CNI_CONTAINERID"),
        (Env { container_id: Some("c".repeat(254).into()), ..env("ADD") }, "CNI_CONTAINERID"),
        (Env { container_id: Some("c".repeat(300).into()), ..env("DEL") }, "CNI_CONTAINERID"),
        (Env { container_id: Some(not_utf8.clone()), ..env("DEL") }, "CNI_CONTAINERID"),
        (Env { ifname: Some("sixteen-bytes-xx".into()), ..env("ADD") }, "CNI_IFNAME"),
        (Env { ifname: Some("..".into()), ..env("DEL") }, "CNI_IFNAME"),
        (Env { ifname: Some("a b".into()), ..env("CHECK") }, "CNI_IFNAME"),
        (Env { netns: Some("".into()), ..env("ADD") }, "CNI_NETNS"),
        (Env { netns: Some("netns/c1".into()), ..env("CHECK") }, "CNI_NETNS"),
        (Env { netns: Some(not_utf8), ..env("ADD") }, "CNI_NETNS"),
    ] {
        let fault = read(&env, &conf(json!({}))).unwrap_err().fault;
        assert_eq!(fault.code, Code::Environment, "{}", fault.msg);
        assert!(fault.msg.contains(name), "{} does not name {name}", fault.msg);
        assert!(fault.msg.len() < 200, "{}", fault.msg);
    }
    assert!(read(&Env { ifname: Some("fifteen-bytes-x".into()), ..env("ADD") }, &conf(json!({}))).is_ok());
    assert!(read(&Env { container_id: Some("c".repeat(253).into()), ..env("ADD") }, &conf(json!({}))).is_ok());
}

#[test]
fn stdin_that_is_no_netconf() {
    for (stdin, code) in [
        ("", Code::Decode),
        ("{", Code::Decode),
        ("{}}", Code::Decode),
        ("\u{feff}{}", Code::Decode),
        ("[]", Code::Config),
        ("null", Code::Config),
        ("{}", Code::IncompatibleVersion),
        (r#"{"cniVersion":"1.0.0"}"#, Code::Config),
        (r#"{"cniVersion":"1.0.0","name":"n"}"#, Code::Config),
        (r#"{"cniVersion":"1.0.0","type":"wharf-cni"}"#, Code::Config),
    ] {
        let failure = read(&env("ADD"), stdin).unwrap_err();
        assert_eq!(failure.fault.code, code, "{stdin:?}: {}", failure.fault.msg);
    }
    assert_eq!(Request::read(&env("ADD"), &mut Broken).unwrap_err().fault.code, Code::Io);
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    assert_eq!(read(&env("ADD"), &deep).unwrap_err().fault.code, Code::Decode);
}

#[test]
fn a_mebibyte_is_read_and_no_more() {
    let filler = |total: usize| {
        let frame = conf(json!({"x": ""})).len();
        conf(json!({"x": "a".repeat(total - frame)}))
    };
    let limit = usize::try_from(MAX_STDIN_BYTES).unwrap();
    assert_eq!(filler(limit).len(), limit);
    assert!(read(&env("ADD"), &filler(limit)).is_ok());
    let fault = read(&env("ADD"), &filler(limit + 1)).unwrap_err().fault;
    assert_eq!(fault.code, Code::Config);
    assert!(Request::read(&env("ADD"), &mut std::io::repeat(b' ')).is_err());
}

#[test]
fn errors_are_told_in_the_version_asked_for() {
    for (asked, told) in [("0.3.1", "0.3.1"), ("0.2.0", "0.2.0"), ("<script>", "1.1.0"), ("", "1.1.0")] {
        let stdin = json!({"cniVersion": asked, "name": "n", "type": ""}).to_string();
        assert_eq!(read(&env("ADD"), &stdin).unwrap_err().version, told);
    }
}

#[test]
fn version_needs_nothing() {
    let bare = Env { command: Some("VERSION".into()), netns: Some("dummy".into()), ..Env::default() };
    for (stdin, version) in [
        (r#"{"cniVersion":"0.4.0"}"#, "0.4.0"),
        (r#"{"cniVersion":"0.1.0"}"#, "1.1.0"),
        (r#"{"cniVersion":7}"#, "1.1.0"),
        ("", "1.1.0"),
        ("not json", "1.1.0"),
    ] {
        match read(&bare, stdin) {
            Ok(Request::Version { cni_version }) => assert_eq!(cni_version, version, "{stdin:?}"),
            other => panic!("{stdin:?}: {other:?}"),
        }
    }
    assert!(matches!(Request::read(&bare, &mut Broken), Ok(Request::Version { .. })));
}

#[test]
fn commands_older_versions_do_not_have() {
    for (verb, version) in [("CHECK", "0.3.1"), ("GC", "1.0.0"), ("STATUS", "1.0.0")] {
        let fault =
            refused(&env(verb), json!({"cniVersion": version, "prevResult": {}, "cni.dev/valid-attachments": []}));
        assert_eq!(fault.code, Code::IncompatibleVersion, "{verb} {version}");
        assert!(fault.msg.contains(&format!("has no {verb};")), "{}", fault.msg);
    }
    assert!(matches!(command(&env("CHECK"), json!({"cniVersion": "0.4.0", "prevResult": {}})), Command::Check { .. }));
    assert!(matches!(command(&env("STATUS"), json!({})), Command::Status));
}

#[test]
fn prev_result_is_for_check_and_for_a_chained_add() {
    let prev = json!({"prevResult": {"interfaces": [], "ips": []}});
    let fault = refused(&env("ADD"), prev);
    assert_eq!((fault.code, fault.details.contains("before wharf-cni")), (Code::Config, true));
    assert!(matches!(command(&env("ADD"), json!({"prevResult": null})), Command::Add { chain: None, .. }));
    let made = json!({"prevResult": {
        "interfaces": [{"name": "eth0", "sandbox": "/run/netns/c1"}],
        "ips": [{"address": "10.1.0.2/24", "interface": 0}],
    }});
    let Command::Add { chain: Some(chain), .. } = command(&env("ADD"), made.clone()) else { panic!("not chained") };
    assert_eq!(chain.ips, ["10.1.0.2".parse::<std::net::IpAddr>().unwrap()]);
    let mut wish = made;
    wish["runtimeConfig"] = json!({"ips": ["10.1.0.3"]});
    assert!(refused(&env("ADD"), wish).msg.contains("10.1.0.3"));
    // The agent decides.
    assert!(matches!(command(&env("CHECK"), json!({})), Command::Check { prev: None, .. }));
    assert_eq!(refused(&env("CHECK"), json!({"prevResult": {"ips": [{"address": "x/24"}]}})).code, Code::Config);
    assert!(matches!(command(&env("DEL"), json!({"prevResult": "nonsense"})), Command::Del { .. }));
}

#[test]
fn an_ipam_plugin_leases_for_every_command_and_a_broken_one_keeps_nobody_from_deleting() {
    let plugin = |env: &Env, keys: Value| match read(env, &conf(keys)) {
        Ok(Request::Ask(ask)) => ask.ipam.map(|ipam| ipam.plugin),
        other => panic!("no command for the agent: {other:?}"),
    };
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
        assert_eq!(
            plugin(&env(verb), json!({"ipam": {"type": "host-local"}})).as_deref(),
            Some("host-local"),
            "{verb}"
        );
        assert_eq!(plugin(&env(verb), json!({})), None, "{verb}");
        for broken in [json!({"ipam": {"type": "../x"}}), json!({"ipam": 5})] {
            match verb {
                "DEL" | "GC" => assert_eq!(plugin(&env(verb), broken), None, "{verb}"),
                _ => assert_eq!(refused(&env(verb), broken).code, Code::Config, "{verb}"),
            }
        }
    }
}

#[test]
fn what_concerns_the_agents_ipam_alone_is_refused_beside_an_ipam_plugin() {
    let annotated = json!({"io.kubernetes.cri.pod-annotations": {"wharf/pool": "blue"}});
    for (key, value) in [("pool", json!("blue")), ("ipMasq", json!(true)), ("runtimeConfig", annotated)] {
        let keys = || json!({"ipam": {"type": "host-local"}, key: value.clone()});
        for verb in ["ADD", "CHECK", "STATUS"] {
            let fault = refused(&env(verb), keys());
            assert!(fault.code == Code::Config && fault.msg.contains("host-local"), "{verb} {key}: {fault:?}");
        }
        assert!(matches!(command(&env("DEL"), keys()), Command::Del { .. }), "{key}");
        assert!(matches!(command(&env("GC"), keys()), Command::Gc { .. }), "{key}");
    }
}

#[test]
fn what_add_refuses_of_a_configuration_check_and_status_refuse_and_del_does_not() {
    for bad in [
        json!({"ingressBurst": 5}),
        json!({"egressRate": "fast"}),
        json!({"runtimeConfig": {"bandwidth": {"ingressRate": -1}}}),
        json!({"runtimeConfig": {"portMappings": [{"hostPort": 0, "containerPort": 80}]}}),
        json!({"runtimeConfig": {"ips": ["nonsense"]}}),
        json!({"args": {"cni": {"mac": "nonsense"}}}),
    ] {
        let faults = ["ADD", "CHECK", "STATUS"].map(|verb| refused(&env(verb), bad.clone()));
        assert!(faults[0].code == Code::Config && faults.iter().all(|fault| *fault == faults[0]), "{bad}: {faults:?}");
        assert!(matches!(command(&env("DEL"), bad.clone()), Command::Del { .. }), "{bad}");
        assert!(matches!(command(&env("GC"), bad), Command::Gc { .. }));
    }
}

#[test]
fn del_wants_neither_netns_nor_good_arguments() {
    for args in ["IP=nonsense", "K8S_POD_NAME", "MAC=1;MAC=2"] {
        let env = Env { netns: None, args: Some(args.into()), ..env("DEL") };
        assert!(matches!(command(&env, json!({"runtimeConfig": {"ips": 5}})), Command::Del { .. }), "{args}");
    }
    let env = Env { netns: Some("".into()), args: Some(OsString::from_vec(vec![0xff])), ..env("DEL") };
    assert!(matches!(command(&env, json!({})), Command::Del { .. }));
    assert_eq!(refused(&env, json!({"socket": 5})).code, Code::Config);
}

#[test]
fn gc_lists() {
    let gc = |keys| match command(&env("GC"), keys) {
        Command::Gc { valid } => valid.iter().map(|a| format!("{}/{}", a.container_id, a.ifname)).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let one = |id: &str| json!({"containerID": id, "ifname": "eth0"});
    assert_eq!(gc(json!({"cni.dev/valid-attachments": [one("b"), one("a")]})), ["a/eth0", "b/eth0"]);
    assert_eq!(gc(json!({"cni.dev/attachments": [one("a")]})), ["a/eth0"]);
    assert_eq!(
        gc(json!({"cni.dev/valid-attachments": [one("a")], "cni.dev/attachments": [one("a"), one("c")]})),
        ["a/eth0", "c/eth0"]
    );
    assert!(gc(json!({"cni.dev/valid-attachments": null})).is_empty());
    assert!(gc(json!({"cni.dev/attachments": null})).is_empty());
    assert!(gc(json!({})).is_empty(), "as libcni sends it for no attachments");
    for keys in [
        json!({"cni.dev/valid-attachments": {}}),
        json!({"cni.dev/valid-attachments": [{"containerID": "a"}]}),
        json!({"cni.dev/valid-attachments": [{"containerID": 5, "ifname": "eth0"}]}),
        json!({"cni.dev/valid-attachments": ["a"]}),
        json!({"cni.dev/valid-attachments": [one("a"), one("a/b")]}),
        json!({"cni.dev/attachments": [one(&"a".repeat(254))]}),
        json!({"cni.dev/attachments": [{"containerID": "a", "ifname": "sixteen-bytes-xx"}]}),
    ] {
        assert_eq!(refused(&env("GC"), keys.clone()).code, Code::Config, "{keys}");
    }
    let fault = refused(&env("GC"), json!({"cni.dev/valid-attachments": [one("a"), one("a/b")]}));
    assert!(fault.msg.contains("cni.dev/valid-attachments[1].containerID"), "{}", fault.msg);
    let bare = Env { command: Some("GC".into()), ..Env::default() };
    assert!(matches!(command(&bare, json!({"cni.dev/valid-attachments": []})), Command::Gc { .. }));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        prop::sample::select(vec![
            "1.1.0",
            "0.3.1",
            "net",
            "/run/s",
            "10.0.0.1/32",
            "eth0",
            "02:00:00:00:00:01",
            "debug"
        ])
        .prop_map(Value::from),
    ];
    let keys = prop::sample::select(vec![
        "cniVersion",
        "name",
        "type",
        "socket",
        "mtu",
        "pool",
        "log-level",
        "dns",
        "args",
        "cni",
        "labels",
        "key",
        "value",
        "ips",
        "mac",
        "runtimeConfig",
        "io.kubernetes.cri.pod-annotations",
        "wharf/ips",
        "prevResult",
        "interfaces",
        "address",
        "interface",
        "sandbox",
        "cni.dev/valid-attachments",
        "cni.dev/attachments",
        "containerID",
        "ifname",
        "nameservers",
        "other",
    ]);
    leaf.prop_recursive(4, 48, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::hash_map(keys.clone().prop_map(str::to_owned), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn any_variable() -> impl Strategy<Value = Option<OsString>> {
    prop_oneof![
        Just(None),
        prop::sample::select(vec!["c1", "eth0", "/run/netns/x", "", "IP=10.0.0.1;K8S_POD_NAME=p"])
            .prop_map(|text| Some(text.into())),
        "\\PC{0,20}".prop_map(|text| Some(text.into())),
        prop::collection::vec(any::<u8>(), 0..20).prop_map(|bytes| Some(OsString::from_vec(bytes))),
    ]
}

fn any_env() -> impl Strategy<Value = Env> {
    let verb = prop::sample::select(vec!["ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION", "", "nonsense"]);
    (verb, any_variable(), any_variable(), any_variable(), any_variable()).prop_map(
        |(command, container_id, netns, ifname, args)| Env {
            command: Some(command.into()),
            container_id,
            netns,
            ifname,
            args,
            runtime: None,
            path: None,
        },
    )
}

fn assert_well_formed(failure: &Failure) {
    let body: Value = serde_json::from_str(&failure.to_json()).unwrap();
    assert!(body["cniVersion"].is_string() && body["code"].is_u64(), "{body}");
    assert!(body["msg"].as_str().is_some_and(|msg| !msg.is_empty() && msg.len() < 4000), "{body}");
}

fn with_base(mut value: Value) -> Value {
    if let Value::Object(map) = &mut value {
        for (key, text) in [("cniVersion", "1.1.0"), ("name", "net"), ("type", "wharf-cni")] {
            map.insert(key.to_owned(), text.into());
        }
        // Random texts are hardly ever absolute paths.
        map.remove("socket");
    }
    value
}

proptest! {
    #[test]
    fn any_bytes_and_environment_give_a_request_or_a_well_formed_error(
        env in any_env(),
        stdin in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        if let Err(failure) = Request::read(&env, &mut stdin.as_slice()) {
            assert_well_formed(&failure);
        }
    }

    #[test]
    fn any_json_and_environment_give_a_request_or_a_well_formed_error(
        env in any_env(),
        document in any_json(),
        based in any::<bool>(),
    ) {
        let document = if based { with_base(document) } else { document };
        if let Err(failure) = Request::read(&env, &mut document.to_string().as_bytes()) {
            assert_well_formed(&failure);
        }
    }

    #[test]
    fn any_arguments_give_addresses_of_distinct_families(args in "(IP=[0-9a-f.:,/]{0,12};|K8S_POD_NAME=\\PC{0,8};|\\PC{0,8};){0,5}") {
        let env = Env { args: Some(args.into()), ..env("ADD") };
        match read(&env, &conf(json!({}))) {
            Ok(Request::Ask(ask)) => match &ask.command {
                Command::Add { args, .. } => {
                    prop_assert!(args.ips.iter().filter(|ip| ip.is_ipv4()).count() <= 1);
                    prop_assert!(args.ips.iter().filter(|ip| ip.is_ipv6()).count() <= 1);
                }
                other => prop_assert!(false, "{:?}", other),
            },
            Ok(other) => prop_assert!(false, "{:?}", other),
            Err(failure) => assert_well_formed(&failure),
        }
    }
}
