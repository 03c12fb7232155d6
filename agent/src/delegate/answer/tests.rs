use super::*;

fn key() -> v1::AttachmentKey {
    v1::AttachmentKey { network: "net".into(), container_id: "c1".into(), interface: "eth0".into() }
}

fn attachment() -> v1::Attachment {
    let link = |name: &str, mac: &str| v1::Interface { name: name.into(), mac: mac.into(), mtu: 1500 };
    let address = |address: &str, prefix_len, gateway: &str| v1::Address {
        address: address.into(),
        prefix_len,
        gateway: Some(gateway.into()),
    };
    v1::Attachment {
        key: Some(key()),
        netns: "/run/netns/c1".into(),
        container: Some(link("eth0", "02:00:00:00:00:0a")),
        host: Some(link("tap7", "")),
        addresses: vec![address("10.1.0.7", 24, "10.1.0.1"), address("fd00::7", 64, "fe80::1")],
        routes: vec![v1::Route { dst: "0.0.0.0/0".into(), gateway: Some("10.1.0.1".into()) }],
        dns: Some(v1::Dns { nameservers: vec!["10.1.0.53".into()], ..v1::Dns::default() }),
    }
}

fn read(attachment: v1::Attachment) -> Result<Made, String> {
    let answer = v1::AddResponse { outcome: Some(v1::add_response::Outcome::Added(attachment)) };
    made(answer, &key()).map_err(|e| e.to_string()).map(|made| made.expect("no failure"))
}

#[test]
fn an_attachment_that_keeps_the_rules_is_read_whole() {
    let made = read(attachment()).expect("read");
    assert_eq!(made.attachment.to_string(), "net/c1:eth0");
    let v4 = made.v4.expect("an address");
    assert_eq!((v4.net.to_string().as_str(), v4.gateway), ("10.1.0.7/24", Some([10, 1, 0, 1].into())));
    assert_eq!(made.v6.expect("an address").net.prefix_len(), 64);
    let (name, host) = made.host.expect("a host side");
    assert_eq!((name.as_str(), host.mac, made.container.mtu), ("tap7", None, 1500));
    assert_eq!((made.routes.len(), made.dns.nameservers.len()), (1, 1));
    let least = v1::Attachment { host: None, addresses: vec![], routes: vec![], dns: None, ..attachment() };
    assert_eq!(read(least).expect("read").v4, None);
}

#[test]
fn each_rule_is_enforced_and_named() {
    type Spoil = fn(&mut v1::Attachment);
    let cases: [(&str, Spoil); 27] = [
        ("key is missing", |a| a.key = None),
        ("which was not asked for", |a| a.key.as_mut().expect("a key").network = "other".into()),
        ("which was not asked for", |a| a.key.as_mut().expect("a key").container_id = "c2".into()),
        ("key.container_id", |a| a.key.as_mut().expect("a key").container_id = "../c".into()),
        ("netns", |a| a.netns = "run/netns/c1".into()),
        ("netns", |a| a.netns = "/x".repeat(4_096)),
        ("control characters", |a| a.netns.push('\n')),
        ("container is missing", |a| a.container = None),
        ("container.name", |a| a.container.as_mut().expect("one").name = "eth1".into()),
        ("container.mac", |a| a.container.as_mut().expect("one").mac = "02:00".into()),
        ("container.mac", |a| a.container.as_mut().expect("one").mac = "ff:ff:ff:ff:ff:ff".into()),
        ("mtu must be", |a| a.container.as_mut().expect("one").mtu = 67),
        ("mtu must be", |a| a.host.as_mut().expect("one").mtu = 65_536),
        ("host.name", |a| a.host.as_mut().expect("one").name = "a/b".into()),
        ("3 of them, at most 2", |a| a.addresses.push(a.addresses[0].clone())),
        ("at most one of each family", |a| a.addresses[1] = a.addresses[0].clone()),
        ("address", |a| a.addresses[0].address = "10.1.0.300".into()),
        ("no address that one host can have", |a| a.addresses[0].address = "224.0.0.1".into()),
        ("no address that one host can have", |a| a.addresses[0].address = "0.0.0.0".into()),
        ("prefix length 33", |a| a.addresses[0].prefix_len = 33),
        ("prefix length 4294967295", |a| a.addresses[0].prefix_len = u32::MAX),
        ("other family", |a| a.addresses[0].gateway = Some("fd00::1".into())),
        ("65 of them, at most 64", |a| a.routes = vec![a.routes[0].clone(); 65]),
        ("there twice", |a| a.routes.push(a.routes[0].clone())),
        ("host bits", |a| a.routes[0].dst = "10.2.0.1/16".into()),
        ("dns.nameservers", |a| a.dns.as_mut().expect("dns").nameservers = vec!["ns1".into()]),
        ("dns.search", |a| a.dns.as_mut().expect("dns").search = vec!["x".repeat(254)]),
    ];
    for (words, spoil) in cases {
        let mut spoilt = attachment();
        spoil(&mut spoilt);
        let why = read(spoilt).expect_err(words);
        assert!(why.contains(words) && why.len() < 300, "{words}: {why}");
    }
}

#[test]
fn failures_are_read_whole_or_refused() {
    let of = |failure: v1::Failure| {
        deleted(v1::DelResponse { outcome: Some(v1::del_response::Outcome::Failure(failure)) })
            .map_err(|e| e.to_string())
    };
    let good = v1::Failure { code: 123, message: "no".into(), details: "do".into(), retry_after_ms: 70_000 };
    let failed = Failed { code: 123, message: "no".into(), details: "do".into(), retry_after_ms: Some(60_000) };
    assert_eq!(of(good.clone()), Ok(Err(failed)));
    for (failure, words) in [
        (v1::Failure { code: 0, ..good.clone() }, "a code other than 0"),
        (v1::Failure { message: String::new(), ..good.clone() }, "failure.message is missing"),
        (v1::Failure { message: "x".repeat(1_025), ..good.clone() }, "longer than 1024"),
        (v1::Failure { details: "\u{7}".into(), ..good }, "control characters"),
    ] {
        let why = of(failure).expect_err(words);
        assert!(why.contains(words), "{why}");
    }
    assert_eq!(deleted(v1::DelResponse::default()), Err(AnswerError::Empty));
}

#[test]
fn a_check_tells_few_findings_of_the_attachment_that_was_asked_for() {
    let checked = |findings: Vec<String>, network: &str| {
        let checked = v1::Checked { attachment: Some(attachment()), findings };
        let answer = v1::CheckResponse { outcome: Some(v1::check_response::Outcome::Checked(checked)) };
        seen(answer, &v1::AttachmentKey { network: network.into(), ..key() }).map_err(|e| e.to_string())
    };
    let seen = checked(vec!["it is down".into()], "").expect("read").expect("no failure");
    assert_eq!(seen.findings, ["it is down"]);
    assert!(checked(vec!["x".into(); 65], "net").expect_err("many").contains("65 of them"));
    assert!(checked(vec![String::new()], "net").is_err());
    assert!(checked(vec![], "other").expect_err("another").contains("not asked for"));
}
