//! Encoding, reading back, damaged messages.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wharf_core::nat::{Masquerade, OverlayPort, PortMapping, Protocol};

use super::{
    super::batch::HEADER_LEN,
    expr::{Expression, Field, register},
    socket::Message,
    table::Chain,
    wire::{GENERIC_LEN, INET},
    *,
};

const CONTAINER4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
const CONTAINER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2));

fn mapping(host_ip: Option<IpAddr>, container: IpAddr) -> PortMapping {
    let (host_port, container_port) = (8080.try_into().unwrap(), 80.try_into().unwrap());
    PortMapping { protocol: Protocol::Udp, host_ip, host_port, container, container_port }
}

fn nat() -> Nat {
    let masquerade = Masquerade {
        pools: vec!["10.77.0.0/16".parse().unwrap(), "fd77::/64".parse().unwrap()],
        excluded: Vec::new(),
        source4: Some(Ipv4Addr::new(192, 0, 2, 1)),
        source6: None,
        services: true,
        former: Vec::new(),
        overlay: Some(OverlayPort { port: 4789, nodes: [CONTAINER4, CONTAINER6].into() }),
    };
    let some = [Some(Ipv4Addr::new(192, 0, 2, 1).into()), Some(Ipv6Addr::LOCALHOST.into())];
    let mappings = vec![
        mapping(None, CONTAINER4),
        mapping(None, CONTAINER6),
        mapping(some[0], CONTAINER4),
        mapping(some[1], CONTAINER6),
    ];
    Nat { masquerade: Some(masquerade), mappings, ..Nat::default() }
}

fn bytes(message: &Message) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_LEN];
    bytes.extend([INET, 0, 0, 0]);
    assert_eq!(bytes.len(), HEADER_LEN + GENERIC_LEN);
    bytes.extend(&message.attributes.0);
    bytes
}

fn read_back(messages: &[Message]) -> Table {
    let mut found = Table::default();
    for message in messages {
        let bytes = bytes(message);
        match message.kind {
            message::NEW_CHAIN => found.chains.extend(read::chain(&bytes, TABLE).unwrap()),
            message::NEW_RULE => {
                let (chain, rule) = read::rule(&bytes).unwrap();
                found.chains.get_mut(&chain).unwrap().rules.push(rule);
            }
            message::NEW_SET => found.sets.extend([read::set(&bytes).unwrap()]),
            message::NEW_SET_ELEM => {
                let list = wire::of_message(&bytes).unwrap();
                let set = wire::text(&list, wire::elem::LIST_SET).unwrap();
                found.sets.get_mut(&set).unwrap().elements.extend(read::elements(&bytes).unwrap());
            }
            _ => {}
        }
    }
    found.objects = u32::try_from(found.chains.len() + found.sets.len()).unwrap();
    found
}

#[test]
fn what_is_written_is_read_back() {
    let desired = Table::of(&nat()).unwrap();
    let seen = read_back(&create(&desired));
    assert_eq!(seen, desired);
    assert_eq!(seen.differences(&nat()).unwrap(), [] as [&str; 0]);
    assert_eq!(seen.mappings(), nat().mappings.into_iter().collect());
}

#[test]
fn threads_share_the_table() {
    const fn shared<T: Send + Sync>() {}
    const { shared::<Nft>() };
    let port = |n: u16| PortMapping { host_port: n.try_into().unwrap(), ..mapping(None, CONTAINER4) };
    let range: Vec<_> = (1..=1_000).map(|n| NatEntry::Port(port(n))).collect();
    assert_eq!(in_words(&range), "udp port 1 of every IPv4 address to 10.77.0.2:80 and 999 more");
}

#[test]
fn many_elements_are_many_messages() {
    let mappings = (1..=1_000).map(|n| PortMapping { host_port: n.try_into().unwrap(), ..mapping(None, CONTAINER6) });
    let desired = Table::of(&Nat { masquerade: None, mappings: mappings.collect(), ..Nat::default() }).unwrap();
    let messages = create(&desired);
    assert!(messages.iter().all(|message| message.attributes.0.len() < usize::from(u16::MAX)));
    assert_eq!(read_back(&messages), desired);
}

#[test]
fn damaged_messages_are_unreadable_at_worst() {
    for message in create(&Table::of(&nat()).unwrap()) {
        let whole = bytes(&message);
        assert!(is_readable(&whole));
        for length in 0..whole.len() {
            let _either = is_readable(&whole[..length]);
            for byte in [0u8, 1, 5, 255] {
                let mut bent = whole.clone();
                bent[length] = byte;
                let _either = is_readable(&bent);
            }
        }
    }
    let mut ipv4 = bytes(&create(&Table::default())[0]);
    ipv4[HEADER_LEN] = wire::IPV4;
    assert_eq!(read::head(&ipv4), Err(Unreadable), "a table of another family");
}

#[test]
fn attributes_are_padded_and_registers_are_told_as_the_kernel_tells_them() {
    let attributes = Attributes::default().bytes(7, &[1]).number(8, 2);
    assert_eq!(attributes.0[..2], 5u16.to_ne_bytes());
    assert_eq!(attributes.0[4..8], [1, 0, 0, 0]);
    assert_eq!(attributes.0[12..], [0, 0, 0, 2]);
    assert_eq!([0, 1, 2, 3, 4, 5, 8, 9].map(register), [1, 9, 10, 11, 2, 13, 3, 17]);
}

#[test]
fn an_attribute_of_zero_equals_none_and_another_value_does_not() {
    let lookup = Expression::within(0, "pools4");
    let rule = vec![lookup.clone()];
    let encoded = expr::encode(&rule);
    assert_eq!(expr::decode(&encoded.0), Some(rule));
    // With flags of zero, as from the kernel.
    let inner = Attributes::default().text(1, "pools4").number(2, 1).number(5, 0);
    let told = Attributes::default().text(1, "lookup").nest(2, &inner);
    assert_eq!(expr::decode(&Attributes::default().nest(1, &told).0), Some(vec![lookup.clone()]));
    assert_ne!(Expression::outside(0, "pools4"), lookup);
    assert_ne!(Expression::within(1, "pools4"), lookup);
    assert_ne!(Expression::address(0, true, Field::Source), Expression::address(0, true, Field::Destination));
}

#[test]
fn a_difference_names_chain_or_set() {
    let mut table = Table::of(&nat()).unwrap();
    table.chains.insert("mine".to_owned(), Chain::default());
    table.chains.remove("output");
    table.sets.get_mut("ports4").unwrap().elements.clear();
    table.sets.get_mut("pools6").unwrap().flags = 0;
    let found = table.differences(&nat()).unwrap();
    let expected = [
        "chain mine: not made by Wharf",
        "chain output: missing",
        "set pools6: its type was changed",
        "set ports4: 1 elements missing or changed, 0 not expected",
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_kernel_without_nf_tables_is_told_from_one_that_refuses() {
    let refusal = |errno| Refusal { errno: io::Error::from_raw_os_error(errno), reason: Some("why".to_owned()) };
    for errno in [libc::EINVAL, libc::EOPNOTSUPP, libc::EPROTONOSUPPORT, libc::EAFNOSUPPORT] {
        let error = missing_or(refusal(errno), "read table");
        assert_eq!(error.kind, KernelErrorKind::Unsupported, "{error}");
        assert!(error.to_string().contains("read table inet wharf") && error.cause.contains("CONFIG_NF_TABLES"));
        assert_eq!(wrap("read table", &io::Error::from_raw_os_error(errno)).kind, KernelErrorKind::Unsupported);
    }
    assert_eq!(missing_or(refusal(libc::EPERM), "read table").kind, KernelErrorKind::Permission);
    let absent = unwritten("write table", vec![(3, refusal(libc::ENOENT))]);
    assert!(absent.kind == KernelErrorKind::Unsupported && absent.cause.contains("NFT_MASQ"), "{absent}");
    let refused = unwritten("write table", vec![(3, refusal(libc::ENOMEM))]);
    assert!(refused.kind == KernelErrorKind::Exhausted && refused.cause.contains("why"), "{refused}");
}
