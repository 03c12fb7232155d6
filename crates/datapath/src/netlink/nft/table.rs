//! The table as a value.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    num::NonZeroU16,
};

use wharf_core::{
    kernel::{KernelErrorKind, Result},
    nat::{Nat, NatEntry, PortMapping, Protocol},
};

use super::{
    SUBJECT,
    expr::Rule,
    rules,
    wire::set::{F_INTERVAL, F_MAP},
};
use crate::error::fail;

/// The node's table, desired or observed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// `enum nft_table_flags`.
    pub(super) flags: u32,
    pub(super) objects: u32,
    pub(super) chains: BTreeMap<String, Chain>,
    pub(super) sets: BTreeMap<String, Set>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) kind: String,
    /// `enum nf_inet_hooks`.
    pub(super) hook: u32,
    pub(super) priority: i32,
    /// `NF_DROP` (0) or `NF_ACCEPT` (1).
    pub(super) policy: u32,
    pub(super) rules: Vec<Rule>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Set {
    /// `enum nft_set_flags`.
    pub(super) flags: u32,
    /// Display types of `nft`; unused by the kernel.
    pub(super) key_type: u32,
    pub(super) data_type: u32,
    /// Bytes; 0 without values.
    pub(super) key_len: u32,
    pub(super) data_len: u32,
    pub(super) elements: BTreeMap<Key, Vec<u8>>,
}

/// Each part of keys and values is padded to four bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) bytes: Vec<u8>,
    /// An interval's exclusive end.
    pub(super) end: bool,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    /// Masqueraded sources, and destinations that are not.
    pub(super) pools: &'static str,
    pub(super) excluded: &'static str,
    /// Published on all addresses, and on one address.
    pub(super) ports: &'static str,
    pub(super) ports_of: &'static str,
    /// Containers and the ports by which they reach themselves.
    pub(super) hairpin: &'static str,
    /// Not masqueraded containers.
    pub(super) own: &'static str,
    /// Addresses of other nodes.
    pub(super) nodes: &'static str,
}

pub(super) const V4: Names = Names {
    pools: "pools4",
    excluded: "excluded4",
    ports: "ports4",
    ports_of: "ports-of4",
    hairpin: "hairpin4",
    own: "own4",
    nodes: "nodes4",
};
pub(super) const V6: Names = Names {
    pools: "pools6",
    excluded: "excluded6",
    ports: "ports6",
    ports_of: "ports-of6",
    hairpin: "hairpin6",
    own: "own6",
    nodes: "nodes6",
};

impl Names {
    pub(super) const fn of(v4: bool) -> Self {
        if v4 { V4 } else { V6 }
    }
}

/// Types of `nft` (`include/datatype.h` of nftables), joined by six bits each.
const ADDRESS4: u32 = 7;
const ADDRESS6: u32 = 8;
const PROTOCOL: u32 = 12;
const PORT: u32 = 13;

fn joined(types: &[u32]) -> u32 {
    types.iter().fold(0, |all, one| all << 6 | one)
}

impl Table {
    /// # Errors
    /// `Exists`: two mappings of one key have different targets.
    pub(super) fn of(nat: &Nat) -> Result<Self> {
        let mut table = Self::default();
        for v4 in [true, false] {
            table.add_sets_of_entries(v4);
        }
        if let Some(masquerade) = &nat.masquerade {
            for (v4, names) in [(true, V4), (false, V6)] {
                let kind = if v4 { ADDRESS4 } else { ADDRESS6 };
                for (name, spans) in [(names.pools, masquerade.sources()), (names.excluded, masquerade.spared())] {
                    let mut elements = BTreeMap::new();
                    for span in spans.into_iter().filter(|span| span.first.is_ipv4() == v4) {
                        elements.insert(Key { bytes: octets(span.first), end: false }, Vec::new());
                        elements.extend(span.after().map(|ip| (Key { bytes: octets(ip), end: true }, Vec::new())));
                    }
                    let key_len = if v4 { 4 } else { 16 };
                    let set = Set { flags: F_INTERVAL, key_type: kind, key_len, elements, ..Set::default() };
                    table.sets.insert(name.to_owned(), set);
                }
                if let Some(overlay) = &masquerade.overlay {
                    let of_family = overlay.nodes.iter().filter(|ip| ip.is_ipv4() == v4);
                    let elements = of_family.map(|ip| (Key { bytes: octets(*ip), end: false }, Vec::new())).collect();
                    let key_len = if v4 { 4 } else { 16 };
                    let set = Set { key_type: kind, key_len, elements, ..Set::default() };
                    table.sets.insert(names.nodes.to_owned(), set);
                }
            }
        }
        for entry in nat.entries() {
            for element in elements(&entry)? {
                let set = table.sets.entry(element.set.to_owned()).or_default();
                let key = Key { bytes: element.key, end: false };
                if set.elements.insert(key, element.data.clone()).is_some_and(|before| before != element.data) {
                    let cause = "two mappings of that port have different targets; publish one of them elsewhere";
                    return Err(fail("publish", entry.to_string(), KernelErrorKind::Exists, cause));
                }
            }
        }
        table.chains = rules::chains(nat.masquerade.as_ref(), nat.redirects);
        table.objects = u32::try_from(table.chains.len() + table.sets.len()).unwrap_or(u32::MAX);
        Ok(table)
    }

    fn add_sets_of_entries(&mut self, v4: bool) {
        let (address, length, names) = if v4 { (ADDRESS4, 4, V4) } else { (ADDRESS6, 16, V6) };
        let map = |parts: &[u32], key_len| Set {
            flags: F_MAP,
            key_type: joined(parts),
            key_len,
            data_type: joined(&[address, PORT]),
            data_len: length + 4,
            elements: BTreeMap::new(),
        };
        let hairpin =
            Set { key_type: joined(&[address, address, PROTOCOL, PORT]), key_len: 2 * length + 8, ..Set::default() };
        self.sets.insert(names.ports.to_owned(), map(&[PROTOCOL, PORT], 8));
        self.sets.insert(names.ports_of.to_owned(), map(&[address, PROTOCOL, PORT], length + 8));
        self.sets.insert(names.hairpin.to_owned(), hairpin);
        self.sets.insert(names.own.to_owned(), Set { key_type: address, key_len: length, ..Set::default() });
    }

    /// The endpoints' entries, without malformed elements.
    #[must_use]
    pub fn entries(&self) -> BTreeSet<NatEntry> {
        let of = |name: &str| self.sets.get(name).map(|set| &set.elements).into_iter().flatten();
        let own = of(V4.own).chain(of(V6.own)).filter_map(|(key, _)| address(&key.bytes)).map(NatEntry::Own);
        self.mappings().into_iter().map(NatEntry::Port).chain(own).collect()
    }

    #[must_use]
    pub fn mappings(&self) -> BTreeSet<PortMapping> {
        let of = |v4, name: &str| {
            let elements = self.sets.get(name).map(|set| &set.elements);
            elements.into_iter().flatten().filter_map(move |(key, data)| mapping(v4, &key.bytes, data))
        };
        let families = [(true, V4), (false, V6)].into_iter();
        families.flat_map(|(v4, names)| of(v4, names.ports).chain(of(v4, names.ports_of))).collect()
    }

    /// Describes the differences.
    ///
    /// # Errors
    /// The desired state contradicts itself.
    pub fn differences(&self, desired: &Nat) -> Result<Vec<String>> {
        let desired = Self::of(desired)?;
        let mut found = Vec::new();
        if self.flags != desired.flags {
            found.push(format!("table {SUBJECT}: flags {:#x}, expected {:#x}", self.flags, desired.flags));
        }
        for name in keys(&self.chains, &desired.chains) {
            found.extend(match (self.chains.get(name), desired.chains.get(name)) {
                (Some(ours), Some(wanted)) => ours.difference(wanted).map(|what| format!("chain {name}: {what}")),
                (ours, _) => Some(format!("chain {name}: {}", presence(ours.is_some()))),
            });
        }
        for name in keys(&self.sets, &desired.sets) {
            found.extend(match (self.sets.get(name), desired.sets.get(name)) {
                (Some(ours), Some(wanted)) => ours.difference(wanted).map(|what| format!("set {name}: {what}")),
                (ours, _) => Some(format!("set {name}: {}", presence(ours.is_some()))),
            });
        }
        if found.is_empty() && self.objects != desired.objects {
            let (now, wanted) = (self.objects, desired.objects);
            found.push(format!("table {SUBJECT}: {now} objects, {wanted} expected"));
        }
        Ok(found)
    }
}

fn presence(there: bool) -> &'static str {
    if there { "not made by Wharf" } else { "missing" }
}

fn keys<'a, T>(ours: &'a BTreeMap<String, T>, wanted: &'a BTreeMap<String, T>) -> BTreeSet<&'a str> {
    ours.keys().chain(wanted.keys()).map(String::as_str).collect()
}

impl Chain {
    fn difference(&self, wanted: &Self) -> Option<String> {
        let head = |c: &Self| (c.kind.clone(), c.hook, c.priority, c.policy);
        if head(self) != head(wanted) {
            return Some("its type, hook, priority or policy was changed".to_owned());
        }
        let (now, expected) = (self.rules.len(), wanted.rules.len());
        if now != expected {
            return Some(format!("{now} rules, {expected} expected"));
        }
        let edited = self.rules.iter().zip(&wanted.rules).position(|(ours, wanted)| ours != wanted)?;
        Some(format!("rule {} was changed", edited + 1))
    }
}

impl Set {
    fn difference(&self, wanted: &Self) -> Option<String> {
        let head = |s: &Self| (s.flags, s.key_type, s.key_len, s.data_type, s.data_len);
        if head(self) != head(wanted) {
            return Some("its type was changed".to_owned());
        }
        let count = |one: &Self, other: &Self| {
            one.elements.iter().filter(|(key, data)| other.elements.get(key) != Some(data)).count()
        };
        let (foreign, missing) = (count(self, wanted), count(wanted, self));
        (foreign + missing > 0).then(|| format!("{missing} elements missing or changed, {foreign} not expected"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Element {
    pub(super) set: &'static str,
    pub(super) key: Vec<u8>,
    pub(super) data: Vec<u8>,
}

/// A translation, and the hairpin, which all mappings of a container port share.
pub(super) fn elements(entry: &NatEntry) -> Result<Vec<Element>> {
    let mapping = match entry {
        NatEntry::Port(mapping) => mapping,
        NatEntry::Own(ip) => {
            let set = Names::of(ip.is_ipv4()).own;
            return Ok(vec![Element { set, key: octets(*ip), data: Vec::new() }]);
        }
    };
    let mapping =
        mapping.checked().map_err(|e| fail("publish", mapping.to_string(), KernelErrorKind::Other, e.to_string()))?;
    let names = Names::of(mapping.container.is_ipv4());
    let container = octets(mapping.container);
    let key = |port: NonZeroU16| [[mapping.protocol.number(), 0, 0, 0], padded(port)].concat();
    let data = [container.as_slice(), &padded(mapping.container_port)].concat();
    let translation = match mapping.host_ip {
        Some(ip) => Element { set: names.ports_of, key: [octets(ip), key(mapping.host_port)].concat(), data },
        None => Element { set: names.ports, key: key(mapping.host_port), data },
    };
    let hairpin = [container.clone(), container, key(mapping.container_port)].concat();
    Ok(vec![translation, Element { set: names.hairpin, key: hairpin, data: Vec::new() }])
}

/// Key: address if any, protocol, port. Value: address, port.
fn mapping(v4: bool, key: &[u8], data: &[u8]) -> Option<PortMapping> {
    let (ip, port) = key.split_at_checked(key.len().checked_sub(8)?)?;
    let (container, container_port) = data.split_at_checked(data.len().checked_sub(4)?)?;
    let (protocol, host_port) = port.split_at_checked(4)?;
    let container = address(container).filter(|ip| ip.is_ipv4() == v4)?;
    let port = |bytes: &[u8]| u16::from_be_bytes(bytes.get(..2)?.try_into().ok()?).try_into().ok();
    Some(PortMapping {
        protocol: Protocol::ALL.into_iter().find(|p| protocol == [p.number(), 0, 0, 0])?,
        host_ip: if ip.is_empty() { None } else { Some(address(ip)?) },
        host_port: port(host_port)?,
        container,
        container_port: port(container_port)?,
    })
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let four = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    four.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}

pub(super) fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn padded(port: NonZeroU16) -> [u8; 4] {
    let [high, low] = port.get().to_be_bytes();
    [high, low, 0, 0]
}
