use tempfile::TempDir;

use super::*;

fn directory(files: &[(&str, &str)]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(directory.path().join(name), text).unwrap();
    }
    directory
}

fn name(text: &str) -> NetworkName {
    NetworkName::parse(text).unwrap()
}

const CHAIN: &str = r#"{"cniVersion": "1.0.0", "name": "front", "plugins": [
    {"type": "one", "capabilities": {"portMappings": true, "mac": false}, "args": {"cni": {"labels": [{"key": "app", "value": "old"},
     {"key": "of-the-network", "value": "x"}]}}, "runtimeConfig": {"own": 1}},
    {"type": "two", "capabilities": {"ips": true}, "key": [1]}]}"#;

#[test]
fn the_first_file_is_the_network_unless_one_is_named() {
    let conf = r#"{"cniVersion": "0.4.0", "name": "single", "type": "bridge"}"#;
    let files = [("20-b.conflist", CHAIN), ("10-a.conf", conf), ("05-notes.txt", "no"), ("30-broken.json", "{")];
    let directory = directory(&files);
    let found = |n: Option<&str>| Network::find(directory.path(), n.map(name).as_ref());
    assert_eq!(found(None).unwrap().name, name("single"));
    assert_eq!(found(Some("front")).unwrap().plugins.len(), 2);
    let error = found(Some("back")).unwrap_err().to_string();
    assert!(error.contains("front") && error.contains("single") && error.contains("30-broken.json"), "{error}");
}

#[test]
fn a_network_that_cannot_be_used_is_refused_with_its_file() {
    let plugins = |plugins: &str| format!(r#"{{"cniVersion": "1.0.0", "name": "n", "plugins": {plugins}}}"#);
    for (text, why) in [
        ("[]", "expected a map"),
        (r#"{"cniVersion": "1.0.0", "plugins": []}"#, "\"name\" is missing"),
        (r#"{"cniVersion": "1.0.0", "name": "../n", "plugins": []}"#, "network name"),
        (r#"{"name": "n", "plugins": [{"type": "x"}]}"#, "\"cniVersion\" is missing"),
        (r#"{"cniVersion": "0.2.0", "name": "n", "plugins": [{"type": "x"}]}"#, "0.2.0 is not supported"),
        (r#"{"cniVersion": "1.0.0", "name": "n"}"#, "\"plugins\" is missing"),
        (&plugins("[]"), "\"plugins\" is empty"),
        (&plugins("[1]"), "\"plugins\": "),
        (&plugins("[{}]"), "\"type\""),
        (&plugins(r#"[{"type": "../../bin/sh"}]"#), "\"type\""),
    ] {
        let directory = directory(&[("10-n.conflist", text)]);
        let error = Network::find(directory.path(), None).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("10-n.conflist"), "{text}: {error}");
    }
    let empty = directory(&[]);
    assert!(matches!(Network::find(empty.path(), None), Err(ConfError::Nothing { .. })));
    assert!(matches!(Network::find(&empty.path().join("x"), None), Err(ConfError::Directory { .. })));
}

#[test]
fn the_newest_common_version_is_spoken() {
    let of = |text: &str| {
        let document: Map<String, Value> = serde_json::from_str(text).unwrap();
        version(&document)
    };
    assert_eq!(of(r#"{"cniVersion": "0.3.1", "cniVersions": ["1.1.0", "9.0.0"]}"#).as_deref(), Ok("1.1.0"));
    assert_eq!(of(r#"{"cniVersions": ["0.4.0", "0.3.0"]}"#).as_deref(), Ok("0.4.0"));
    assert!(of(r#"{"cniVersion": "9.0.0"}"#).is_err());
}

#[test]
fn each_plugin_gets_what_it_asks_for_and_nothing_else() {
    let directory = directory(&[("10-front.conflist", CHAIN)]);
    let network = Network::find(directory.path(), None).unwrap();
    let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
    let ports = ["8080:80".parse::<crate::port::Port>().unwrap().mapping()];
    let ips = ["10.0.0.7".parse().unwrap()];
    let wishes = Wishes { labels: Some(&labels), ports: &ports, ips: &ips, mac: Some("02:00:00:00:00:07") };
    let attachment = network.attachment(IfName::parse("eth0").unwrap(), &wishes).unwrap();
    let labels = json!([{"key": "of-the-network", "value": "x"}, {"key": "app", "value": "web"}]);
    let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp"});
    let one = json!({"cniVersion": "1.0.0", "name": "front", "type": "one", "args": {"cni": {"labels": labels}},
                     "runtimeConfig": {"own": 1, "portMappings": [mapping]}});
    let two = json!({"cniVersion": "1.0.0", "name": "front", "type": "two", "key": [1],
                     "args": {"cni": {"labels": [{"key": "app", "value": "web"}]}}, "runtimeConfig": {"ips": ["10.0.0.7"]}});
    assert_eq!(attachment.plugins, [one, two]);
    assert_eq!(attachment.cni_args, "IgnoreUnknown=1;MAC=02:00:00:00:00:07");
    assert!(attachment.check && attachment.to_delete == 0 && attachment.result.is_none());
}

#[test]
fn a_port_that_no_plugin_would_publish_is_refused() {
    let conf = r#"{"cniVersion": "0.3.1", "name": "plain", "type": "bridge"}"#;
    let directory = directory(&[("10-plain.conf", conf)]);
    let network = Network::find(directory.path(), None).unwrap();
    let ifname = || IfName::parse("eth0").unwrap();
    let ports = ["8080:80".parse::<crate::port::Port>().unwrap().mapping()];
    let error = network.attachment(ifname(), &Wishes { ports: &ports, ..Wishes::default() }).unwrap_err();
    assert!(error.to_string().contains("--publish") && error.hint().unwrap().contains("portMappings"), "{error}");
    let plain = network.attachment(ifname(), &Wishes::default()).unwrap();
    assert_eq!(plain.plugins, [json!({"cniVersion": "0.3.1", "name": "plain", "type": "bridge"})]);
    assert!(!plain.check, "0.3.1 has no CHECK");
}
