//! Keys of the policy tables, and readable rows. IPv4 prefixes are IPv4-mapped: all of IPv4 is `::ffff:0:0/96`.

use aya::maps::lpm_trie::Key;
use ipnet::IpNet;
use wharf_common::{
    EndpointKey, PortKey,
    flow::{ICMP, ICMPV6, SCTP, TCP, UDP},
    policy::{DENY, PASS, PORT_PREFIX_BITS, redirected},
};
use wharf_core::policy::{Cell, PortRange, RowChange};

use crate::bpf::rows::{address_of, key_of};

pub(crate) type Cause = &'static str;
type Result<T> = std::result::Result<T, Cause>;

const MAPPED_BITS: u8 = 96;
const PORT_BITS: u8 = 16;

const BEYOND: Cause = "it has bits beyond its prefix";
const TOO_LONG: Cause = "its prefix is longer than its address";

pub(crate) fn peer_key(net: IpNet) -> Result<Key<EndpointKey>> {
    let net = net.trunc();
    let length = match net {
        IpNet::V4(net) => MAPPED_BITS + net.prefix_len(),
        IpNet::V6(net) if net.addr().to_ipv4_mapped().is_some() => {
            return Err("it is a prefix of IPv4 in the notation of IPv6; name the prefix of IPv4");
        }
        IpNet::V6(net) => net.prefix_len(),
    };
    Ok(Key::new(u32::from(length), key_of(net.addr())))
}

pub(crate) fn peer_of(key: &Key<EndpointKey>) -> Result<IpNet> {
    let address = address_of(&key.data());
    let length = u8::try_from(key.prefix_len()).map_err(|_| TOO_LONG)?;
    let length = if address.is_ipv4() { length.checked_sub(MAPPED_BITS).ok_or(BEYOND)? } else { length };
    let net = IpNet::new(address, length).map_err(|_| TOO_LONG)?;
    if net == net.trunc() { Ok(net) } else { Err(BEYOND) }
}

fn port_mask(length: u8) -> Result<u16> {
    let rest = PORT_BITS.checked_sub(length).ok_or("its prefix is longer than a port")?;
    Ok(u16::MAX.checked_shl(u32::from(rest)).unwrap_or(0))
}

fn check_protocol(protocol: u8) -> Result<()> {
    let known = [TCP, UDP, SCTP, ICMP, ICMPV6].contains(&protocol);
    if known { Ok(()) } else { Err("its protocol is none of TCP, UDP, SCTP, ICMP and ICMPv6") }
}

/// Truncates the port to the prefix.
pub(crate) fn port_key(range: &PortRange) -> Result<Key<PortKey>> {
    check_protocol(range.protocol)?;
    let port = (range.first & port_mask(range.length)?).to_be_bytes();
    let key = PortKey { set: range.set, protocol: range.protocol, _pad: 0, port };
    Ok(Key::new(PORT_PREFIX_BITS + u32::from(range.length), key))
}

pub(crate) fn port_of(key: &Key<PortKey>) -> Result<PortRange> {
    let PortKey { set, protocol, _pad, port } = key.data();
    check_protocol(protocol)?;
    let length = key.prefix_len().checked_sub(PORT_PREFIX_BITS).ok_or("its prefix ends before the port")?;
    let length = u8::try_from(length).map_err(|_| TOO_LONG)?;
    let first = u16::from_be_bytes(port);
    if first & !port_mask(length)? == 0 && _pad == 0 {
        Ok(PortRange { set, protocol, first, length })
    } else {
        Err(BEYOND)
    }
}

pub(crate) fn sound(cell: &Cell) -> Result<()> {
    if cell.admin.ruling > PASS && redirected(cell.admin.ruling).is_none() {
        return Err("its ruling of the admin tier is none of accept, deny, pass and a redirect to a port");
    }
    if cell.rest.ruling > DENY && redirected(cell.rest.ruling).is_none() {
        return Err("its ruling of the tiers after the admin tier is none of accept, deny and a redirect to a port");
    }
    Ok(())
}

pub(crate) fn subject(change: &RowChange) -> String {
    match change {
        RowChange::Sets(id, _) => format!("the rule sets of endpoint {id}"),
        RowChange::Peer(net, _) => format!("the peer class of {net}"),
        RowChange::Ports(range, _) => {
            let (set, protocol, ports) = (range.set, range.protocol, readable::range(range));
            format!("the port class of {ports}, protocol {protocol}, rule set {set}")
        }
        RowChange::Cell(key, _) => {
            format!("the cell of peer class {}, port class {}, rule set {}", key.class, key.port, key.set)
        }
    }
}

pub(crate) mod readable {
    use ipnet::IpNet;
    use wharf_common::{
        CellKey, PeerRow, SetsRow,
        policy::{ACCEPT, DENY, Hit, NO_RANK, PASS, redirected},
    };
    use wharf_core::{
        ids::EndpointId,
        policy::{Cell, Judged, Mode, PortRange},
    };

    use crate::bpf::inventory::{Row, row};

    pub(super) fn range(range: &PortRange) -> String {
        let others = super::port_mask(range.length).map_or(0, |mask| !mask);
        let (first, last) = (range.first & !others, range.first | others);
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    }

    pub(crate) fn peer(net: &IpNet, peer: &PeerRow) -> Row {
        row([("prefix", net.to_string()), ("identity", peer.identity.to_string()), ("class", peer.class.to_string())])
    }

    pub(crate) fn ports(ports: &PortRange, class: u32) -> Row {
        row([
            ("set", ports.set.to_string()),
            ("protocol", ports.protocol.to_string()),
            ("ports", range(ports)),
            ("class", class.to_string()),
        ])
    }

    pub(crate) fn cell(key: &CellKey, cell: &Cell, judged: &Judged) -> Row {
        row([
            ("set", key.set.to_string()),
            ("class", key.class.to_string()),
            ("port_class", key.port.to_string()),
            ("admin", hit(&cell.admin)),
            ("rest", hit(&cell.rest)),
            ("packets", judged.packets.to_string()),
            ("bytes", judged.bytes.to_string()),
        ])
    }

    pub(crate) fn sets(id: EndpointId, sets: &SetsRow) -> Row {
        row([("endpoint", id.to_string()), ("ingress", sets.ingress.to_string()), ("egress", sets.egress.to_string())])
    }

    pub(crate) fn address_generation((slot, generation): (u32, u32)) -> Row {
        row([("slot", slot.to_string()), ("generation", generation.to_string())])
    }

    pub(crate) fn state(generation: u32, mode: Mode) -> Row {
        let flags = [(mode.keeps_flows, "keeps-flows"), (mode.audits, "audits")];
        let flags: Vec<&str> = flags.iter().filter(|(set, _)| *set).map(|(_, name)| *name).collect();
        row([("generation", generation.to_string()), ("flags", flags.join(","))])
    }

    fn hit(hit: &Hit) -> String {
        if hit.rank == NO_RANK {
            return String::new();
        }
        let ruling = match hit.ruling {
            ACCEPT => "accept".to_owned(),
            DENY => "deny".to_owned(),
            PASS => "pass".to_owned(),
            ruling => redirected(ruling).map_or_else(
                || format!("unknown ({ruling:#x})"),
                |(port, open)| format!("redirect to port {port}{}", if open { ", open," } else { "" }),
            ),
        };
        format!("{ruling} rule {} rank {}", hit.rule, hit.rank)
    }
}

#[cfg(test)]
mod tests {
    use wharf_common::policy::{ACCEPT, Hit, redirect};

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().expect("a network")
    }

    fn raw(length: u32, address: &str) -> Key<EndpointKey> {
        let address: std::net::Ipv6Addr = address.parse().expect("an address");
        Key::new(length, EndpointKey::v6(address.octets()))
    }

    #[test]
    fn a_prefix_of_ipv4_is_the_mapped_one() {
        for (text, length, address) in [
            ("0.0.0.0/0", 96, "::ffff:0:0"),
            ("10.1.0.0/16", 112, "::ffff:10.1.0.0"),
            ("10.1.2.3/16", 112, "::ffff:10.1.0.0"),
            ("10.1.2.3/32", 128, "::ffff:10.1.2.3"),
            ("::/0", 0, "::"),
            ("2001:db8::1/32", 32, "2001:db8::"),
        ] {
            let (key, want) = (peer_key(net(text)).expect("a key"), raw(length, address));
            assert_eq!((key.prefix_len(), key.data()), (want.prefix_len(), want.data()), "{text}");
            assert_eq!(peer_of(&key), Ok(net(text).trunc()), "{text}");
        }
    }

    #[test]
    fn a_prefix_of_ipv4_in_ipv6_notation_is_refused() {
        for text in ["::ffff:0:0/96", "::ffff:10.0.0.0/104", "::ffff:10.0.0.1/128"] {
            assert!(peer_key(net(text)).is_err(), "{text}");
        }
        assert!(peer_key(net("::ffff:10.0.0.1/64")).is_ok(), "it is ::/64");
    }

    #[test]
    fn keys_that_no_prefix_has_are_refused() {
        for (length, address) in [
            (129, "fd00::1"),
            (u32::MAX, "fd00::1"),
            (129, "::ffff:10.0.0.1"),
            (95, "::ffff:10.0.0.1"),
            (0, "::ffff:0:0"),
            (112, "::ffff:10.0.0.1"),
            (64, "fd00::1"),
        ] {
            assert!(peer_of(&raw(length, address)).is_err(), "{address}/{length}");
        }
    }

    #[test]
    fn ports_read_back_from_their_key_without_the_bits_beyond() {
        for (first, length, want, text) in [
            (80, 16, 80, "80"),
            (8_083, 12, 8_080, "8080-8095"),
            (0, 0, 0, "0-65535"),
            (65_535, 1, 32_768, "32768-65535"),
        ] {
            let range = PortRange { set: 3, protocol: TCP, first, length };
            let key = port_key(&range).expect("a key");
            assert_eq!(key.data().port, u16::to_be_bytes(want));
            assert_eq!(port_of(&key), Ok(PortRange { first: want, ..range }));
            assert_eq!(readable::range(&range), text);
        }
    }

    #[test]
    fn ports_that_no_range_has_are_refused() {
        let range = PortRange { set: 3, protocol: TCP, first: 80, length: 16 };
        for bad in [PortRange { length: 17, ..range }, PortRange { protocol: 47, ..range }] {
            assert!(port_key(&bad).is_err(), "{bad:?}");
            assert!(subject(&RowChange::Ports(bad, None)).contains("80"), "told all the same");
        }
        let data = PortKey { set: 3, protocol: TCP, _pad: 0, port: 80_u16.to_be_bytes() };
        for (length, data) in [
            (47, data),
            (65, data),
            (u32::MAX, data),
            (56, data),
            (64, PortKey { protocol: 47, ..data }),
            (64, PortKey { _pad: 1, ..data }),
        ] {
            assert!(port_of(&Key::new(length, data)).is_err(), "{data:?}/{length}");
        }
        assert!(port_of(&Key::new(64, data)).is_ok());
    }

    #[test]
    fn rulings_are_those_of_their_tier() {
        let hit = |ruling| Hit { rank: 1, rule: 7, ruling };
        let cell = |admin, rest| Cell { admin: hit(admin), rest: hit(rest) };
        assert_eq!(sound(&cell(PASS, DENY)), Ok(()));
        assert_eq!(sound(&Cell { admin: Hit::NONE, rest: Hit::NONE }), Ok(()));
        assert!(sound(&cell(PASS + 1, ACCEPT)).is_err());
        assert!(sound(&cell(ACCEPT, PASS)).is_err());
        let to_proxy = redirect(15_001, false);
        assert_eq!(sound(&cell(to_proxy, redirect(15_001, true))), Ok(()));
        for odd in [redirect(0, false), to_proxy | 1 << 3, to_proxy - 1] {
            assert!(sound(&cell(odd, ACCEPT)).is_err() && sound(&cell(ACCEPT, odd)).is_err(), "{odd:#x}");
        }
    }
}
