//! Rules for external texts. An error is the broken rule.

use std::net::IpAddr;

use wharf_names::ids::MacAddr;
pub(crate) use wharf_names::rules::{ifname, name};

/// The agent has another working directory.
pub(crate) fn netns(path: &str) -> Result<(), &'static str> {
    if path.starts_with('/') { Ok(()) } else { Err("must be an absolute path") }
}

pub(crate) fn mac(text: &str) -> Result<String, &'static str> {
    text.parse().map(|mac: MacAddr| mac.to_string()).map_err(|e| e.reason)
}

/// Ignores a prefix length, which other plugins require.
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

pub(crate) fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for text in ["", ".", "-a", "_a", "a/b", "a:b", "a b", "a\0", "é", "a@1"] {
            assert!(name(text).is_err(), "{text}");
        }
        assert!(name(&"a".repeat(253)).is_ok() && name(&"a".repeat(254)).is_err());
        for text in ["", ".", "..", "a/b", "a:b", "a b", "a\tb", "a\u{a0}b"] {
            assert!(ifname(text).is_err(), "{text}");
        }
        assert!(ifname("fifteen-bytes-x").is_ok() && ifname("sixteen-bytes-xx").is_err());
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
}
