//! Source prefixes: addresses behind a container (a router, a VPN) that it may send from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

/// Never sources of hosts behind a container.
const SPECIAL: [(IpNet, &str); 9] = [
    (v4([0, 0, 0, 0], 8), "unspecified addresses"),
    (v4([127, 0, 0, 0], 8), "loopback addresses"),
    (v4([169, 254, 0, 0], 16), "link-local addresses"),
    (v4([224, 0, 0, 0], 4), "multicast addresses"),
    (v4([240, 0, 0, 0], 4), "reserved and broadcast addresses"),
    (v6(0, 0, 127), "the unspecified and the loopback address"),
    (v6(0, 0xffff, 96), "IPv4-mapped addresses"),
    (v6(0xfe80, 0, 10), "link-local addresses"),
    (v6(0xff00, 0, 8), "multicast addresses"),
];

const fn v4([a, b, c, d]: [u8; 4], len: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), len))
}

const fn v6(first: u16, sixth: u16, len: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(first, 0, 0, 0, 0, sixth, 0, 0), len))
}

/// Source prefixes of an endpoint: sorted, without host bits or overlaps, at most [`Self::MAX`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<IpNet>", into = "Vec<IpNet>")]
pub struct SourcePrefixes(Vec<IpNet>);

/// Why prefixes are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SourcesError {
    /// More than [`SourcePrefixes::MAX`].
    #[error("{0} source prefixes, at most {max} are taken; merge adjacent ones", max = SourcePrefixes::MAX)]
    Many(usize),
    #[error("source prefix {0} has host bits; write {canonical}", canonical = .0.trunc())]
    HostBits(IpNet),
    /// Overlaps a special-purpose network.
    #[error("source prefix {prefix} overlaps {special}, {what}; narrow it, or leave it out")]
    Special {
        prefix: IpNet,
        special: IpNet,
        /// Its purpose.
        what: &'static str,
    },
    /// Two overlap.
    #[error("source prefix {inner} is in {outer}; leave one of them out")]
    Nested {
        /// The longer.
        inner: IpNet,
        /// The shorter.
        outer: IpNet,
    },
}

impl SourcePrefixes {
    /// Of both families together.
    pub const MAX: usize = 8;

    /// Prefixes by the rules that do not depend on the node. Equal prefixes are merged.
    ///
    /// # Errors
    /// [`SourcesError`].
    pub fn new(mut prefixes: Vec<IpNet>) -> Result<Self, SourcesError> {
        if prefixes.len() > Self::MAX {
            return Err(SourcesError::Many(prefixes.len()));
        }
        prefixes.sort_unstable();
        prefixes.dedup();
        if let Some(prefix) = prefixes.iter().find(|prefix| **prefix != prefix.trunc()) {
            return Err(SourcesError::HostBits(*prefix));
        }
        for (at, prefix) in prefixes.iter().enumerate() {
            if let Some((special, what)) = SPECIAL.iter().find(|(special, _)| overlap(special, prefix)) {
                return Err(SourcesError::Special { prefix: *prefix, special: *special, what });
            }
            // The order puts the shorter of two prefixes first.
            if let Some(inner) = prefixes.iter().skip(at).skip(1).find(|other| prefix.contains(*other)) {
                return Err(SourcesError::Nested { inner: *inner, outer: *prefix });
            }
        }
        Ok(Self(prefixes))
    }

    /// True without prefixes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sorted.
    pub fn iter(&self) -> impl Iterator<Item = &IpNet> {
        self.0.iter()
    }

    /// A prefix contains the address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|prefix| prefix.contains(&address))
    }

    /// For each prefix its first host, and an address next to it that a host can have and no prefix contains, if any.
    pub fn samples(&self) -> impl Iterator<Item = (IpNet, IpAddr, Option<IpAddr>)> {
        self.0.iter().filter_map(|prefix| {
            // The first IPv6 address of a subnet is anycast (RFC 4291, 2.6.1).
            let is_subnet = prefix.addr().is_ipv6() && prefix.max_prefix_len() - prefix.prefix_len() > 1;
            let host = prefix.hosts().nth(usize::from(is_subnet))?;
            let is_foreign = |ip: &IpAddr| !self.contains(*ip) && Self::new(vec![(*ip).into()]).is_ok();
            Some((*prefix, host, neighbours(prefix).into_iter().flatten().find(is_foreign)))
        })
    }

    /// The first prefix that shares addresses with a network.
    #[must_use]
    pub fn overlapping(&self, network: &IpNet) -> Option<IpNet> {
        self.0.iter().find(|prefix| overlap(prefix, network)).copied()
    }
}

/// The smallest and largest neighbours of a network.
fn neighbours(prefix: &IpNet) -> [Option<IpAddr>; 2] {
    match prefix {
        IpNet::V4(net) => [
            net.network().to_bits().checked_sub(1).map(|bits| Ipv4Addr::from_bits(bits).into()),
            net.broadcast().to_bits().checked_add(1).map(|bits| Ipv4Addr::from_bits(bits).into()),
        ],
        IpNet::V6(net) => [
            net.network().to_bits().checked_sub(1).map(|bits| Ipv6Addr::from_bits(bits).into()),
            net.broadcast().to_bits().checked_add(1).map(|bits| Ipv6Addr::from_bits(bits).into()),
        ],
    }
}

/// Prefixes either contain each other or are disjoint.
fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

impl TryFrom<Vec<IpNet>> for SourcePrefixes {
    type Error = SourcesError;

    fn try_from(prefixes: Vec<IpNet>) -> Result<Self, SourcesError> {
        Self::new(prefixes)
    }
}

impl From<SourcePrefixes> for Vec<IpNet> {
    fn from(prefixes: SourcePrefixes) -> Self {
        prefixes.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixes(texts: &str) -> Result<SourcePrefixes, String> {
        let prefixes = texts.split(' ').map(|text| text.parse().expect("a prefix")).collect();
        SourcePrefixes::new(prefixes).map_err(|e| e.to_string())
    }

    #[test]
    fn prefixes_are_sorted_merged_and_searched() {
        let read = prefixes("fd00:9::/64 10.201.0.0/16 10.200.0.0/16 10.201.0.0/16").expect("prefixes");
        let texts: Vec<String> = read.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.200.0.0/16", "10.201.0.0/16", "fd00:9::/64"]);
        for (address, is_in) in
            [("10.201.255.255", true), ("10.202.0.0", false), ("fd00:9::1", true), ("fd00:a::", false)]
        {
            assert_eq!(read.contains(address.parse().expect("an address")), is_in, "{address}");
        }
        for (network, shared) in
            [("10.0.0.0/8", true), ("10.200.1.0/24", true), ("10.87.0.0/16", false), ("::/0", true)]
        {
            assert_eq!(read.overlapping(&network.parse().expect("a network")).is_some(), shared, "{network}");
        }
        assert!(SourcePrefixes::default().is_empty());
    }

    #[test]
    fn a_sample_is_a_host_and_an_address_that_no_prefix_has() {
        let read = prefixes("1.0.0.0/9 10.200.0.0/16 128.0.0.0/32 fd00:9::/64 fd00:9:0:1::7/128").expect("prefixes");
        let samples: Vec<String> = read
            .samples()
            .map(|(_, host, beside)| format!("{host} {}", beside.map_or_else(String::new, |ip| ip.to_string())))
            .collect();
        let expected = [
            "1.0.0.1 1.128.0.0",
            "10.200.0.1 10.199.255.255",
            "128.0.0.0 128.0.0.1",
            "fd00:9::1 fd00:8:ffff:ffff:ffff:ffff:ffff:ffff",
            "fd00:9:0:1::7 fd00:9:0:1::6",
        ];
        assert_eq!(samples, expected);
    }

    #[test]
    fn what_no_host_behind_a_container_has_is_refused() {
        let many: Vec<String> = (0..9).map(|n| format!("10.{n}.0.0/16")).collect();
        for (texts, words) in [
            (many.join(" ").as_str(), "9 source prefixes, at most 8"),
            ("10.200.0.1/16", "10.200.0.1/16 has host bits; write 10.200.0.0/16"),
            ("fd00:9::1/64", "write fd00:9::/64"),
            ("0.0.0.0/0", "overlaps 0.0.0.0/8, unspecified"),
            ("::/0", "overlaps ::/127"),
            ("127.0.0.1/32", "loopback"),
            ("128.0.0.0/1", "overlaps 169.254.0.0/16, link-local"),
            ("224.0.0.0/24", "multicast"),
            ("255.255.255.255/32", "broadcast"),
            ("::1/128", "loopback"),
            ("::ffff:a00:0/112", "IPv4-mapped"),
            ("fe80::/64", "link-local"),
            ("ff00::/8", "multicast"),
            ("10.200.1.0/24 10.200.0.0/16", "10.200.1.0/24 is in 10.200.0.0/16"),
            ("fd00:9::/64 fd00:9::7/128", "fd00:9::7/128 is in fd00:9::/64"),
        ] {
            let refused = prefixes(texts).expect_err(texts);
            assert!(refused.contains(words), "{texts}: {refused}");
        }
    }

    #[test]
    fn a_stored_list_keeps_the_rules() {
        let read = |text: &str| serde_json::from_str::<SourcePrefixes>(text);
        let stored = r#"["10.200.0.0/16","fd00:9::/64"]"#;
        assert_eq!(serde_json::to_string(&read(stored).expect("prefixes")).expect("written"), stored);
        for hostile in [r#"["10.200.0.1/16"]"#, r#"["0.0.0.0/0"]"#, r#"["x"]"#, "{}"] {
            assert!(read(hostile).is_err(), "{hostile}");
        }
        let many: Vec<String> = (0..=255).map(|n| format!("\"10.{n}.0.0/16\"")).collect();
        assert!(read(&format!("[{}]", many.join(","))).is_err());
    }
}
