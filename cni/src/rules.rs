//! Rules for texts from outside, so that what breaks one is refused here, under the name of the variable or key it came
//! in. Those for names and interface names are the deletion record's too (`wharf_handover::names`); they and that for MAC
//! addresses are the agent's own (`wharf_core::ids`), said again because the shim does not link the agent's rooms; a test
//! holds the two against each other. Each error is the rule that was broken.

use std::net::IpAddr;

pub(crate) use wharf_handover::names::{ifname, name};

/// Paths of network namespaces: the agent opens them, and its working directory is not the runtime's.
pub(crate) fn netns(path: &str) -> Result<(), &'static str> {
    if path.starts_with('/') { Ok(()) } else { Err("must be an absolute path") }
}

/// A MAC address, in lower case.
pub(crate) fn mac(text: &str) -> Result<String, &'static str> {
    let bytes: Vec<&str> = text.split(':').collect();
    if bytes.len() != 6 || !bytes.iter().all(|b| b.len() == 2 && b.bytes().all(|c| c.is_ascii_hexdigit())) {
        return Err("must be six two-digit hex bytes joined by ':'");
    }
    // The lowest bit of the first byte marks a group.
    let group = bytes.first().and_then(|first| u8::from_str_radix(first, 16).ok()).is_none_or(|first| first & 1 == 1);
    if group || bytes.iter().all(|byte| *byte == "00") {
        return Err("must be a unicast address other than zero");
    }
    Ok(text.to_ascii_lowercase())
}

/// An IP address. A prefix length behind it, which other plugins want there, is accepted and passed over: an endpoint's
/// are always whole addresses.
pub(crate) fn address(text: &str) -> Result<IpAddr, &'static str> {
    let rule = "is not an IP address";
    let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
    let ip: IpAddr = address.parse().map_err(|_| rule)?;
    let longest = if ip.is_ipv4() { 32 } else { 128 };
    match prefix.map(str::parse::<u8>) {
        None => Ok(ip),
        Some(Ok(prefix)) if prefix <= longest => Ok(ip),
        Some(_) => Err("has a wrong prefix length"),
    }
}

/// At most 80 characters of hostile text, for a message.
pub(crate) fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wharf_core::ids::{ContainerId, IfName, MacAddr, NetworkName};

    use super::*;

    #[track_caller]
    fn assert_agents_rules(text: &str) {
        assert_eq!(name(text).is_ok(), ContainerId::parse(text).is_ok(), "container id {text:?}");
        assert_eq!(name(text).is_ok(), NetworkName::parse(text).is_ok(), "network name {text:?}");
        assert_eq!(ifname(text).is_ok(), IfName::parse(text).is_ok(), "interface name {text:?}");
    }

    #[test]
    fn names_break_and_keep_the_agents_rules_at_every_edge() {
        for length in [1, 15, 16, 253, 254, 300] {
            assert_agents_rules(&"a".repeat(length));
        }
        for text in
            ["", ".", "..", "...", "-a", "_a", "a_.-", "a/b", "a:b", "a b", "a\tb", "a\0", "a\u{a0}b", "é", "a@1", "9"]
        {
            assert_agents_rules(text);
        }
        assert!(name(&"a".repeat(253)).is_ok() && name(&"a".repeat(254)).is_err());
        assert!(ifname("fifteen-bytes-x").is_ok() && ifname("sixteen-bytes-xx").is_err());
        // Bytes, not characters.
        assert!(ifname("ééééééé").is_ok() && ifname("éééééééé").is_err());
    }

    #[test]
    fn mac_addresses() {
        for text in ["02:00:00:00:00:0A", "00:00:00:00:00:01", "fe:ff:ff:ff:ff:ff"] {
            assert_eq!(mac(text), Ok(text.to_ascii_lowercase()));
        }
        for text in
            ["", "02:00", "02:00:00:00:00:0g", "01:00:5e:00:00:01", "00:00:00:00:00:00", "02:00:00:00:00:00:01", "+2:"]
        {
            assert!(mac(text).is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_with_and_without_prefix() {
        for text in ["10.0.0.1", "10.0.0.1/0", "10.0.0.1/32"] {
            assert_eq!(address(text).map(|ip| ip.to_string()), Ok("10.0.0.1".into()), "{text}");
        }
        assert!(address("fd00::1/128").is_ok());
        for text in ["", "/24", "10.0.0.1/", "10.0.0.1/33", "10.0.0.1/x", "10.0.0.1/24/24", "fd00::1/129", "10.0.0.300"]
        {
            assert!(address(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn names_keep_the_agents_rules(text in "[a-z0-9A-Z_.-]{0,20}|[ -~]{0,20}|\\PC{0,20}|a[a-z.]{240,260}") {
            assert_agents_rules(&text);
        }

        #[test]
        fn mac_addresses_keep_the_agents_rules(text in "([0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}|([0-9a-g]{1,2}:){4,6}[0-9a-g]{1,2}") {
            let agents = text.parse::<MacAddr>().ok().map(|mac| mac.to_string());
            prop_assert_eq!(mac(&text).ok(), agents);
        }
    }
}
