//! Rows of `SOURCES`: the prefixes that an endpoint may use as sources, by its link's host index.

use std::collections::BTreeSet;

use aya::maps::{HashMap, MapData, MapError};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use wharf_common::{
    EndpointKey, SourcePrefix, SourcesRow,
    map::{self, FLAG_SOURCES},
};
use wharf_core::{
    endpoint::EndpointRecord,
    finding::{EndpointProblem, NodeProblem},
    ids::{EndpointId, Epoch, IfIndex},
    kernel::{ConfigSpec, KernelErrorKind, Result},
    sources::SourcePrefixes,
};
use wharf_crash as crash;

use super::{
    Bpf,
    inventory::{Row, row},
    maps,
    rows::{address_of, unless_missing},
};
use crate::error::wrap;

const _: () = assert!(SourcePrefixes::MAX == map::SOURCES_SHARE);

/// Bits before an IPv4 address in its IPv4-mapped one.
const MAPPED_BITS: u8 = 96;

fn mask(length: u8) -> [u8; 16] {
    let rest = 128_u32.saturating_sub(length.into());
    u128::MAX.checked_shl(rest).unwrap_or_default().to_be_bytes()
}

fn prefix_of(net: &IpNet) -> SourcePrefix {
    match net {
        IpNet::V4(net) => SourcePrefix {
            addr: EndpointKey::v4(net.network().octets()).addr,
            mask: mask(net.prefix_len().saturating_add(MAPPED_BITS)),
        },
        IpNet::V6(net) => SourcePrefix { addr: net.network().octets(), mask: mask(net.prefix_len()) },
    }
}

fn net_of(prefix: &SourcePrefix) -> Option<IpNet> {
    let bits = u8::try_from(u128::from_be_bytes(prefix.mask).leading_ones()).ok()?;
    if *prefix == SourcePrefix::NONE || mask(bits) != prefix.mask {
        return None;
    }
    match address_of(&EndpointKey { addr: prefix.addr }) {
        std::net::IpAddr::V4(address) => Ipv4Net::new(address, bits.checked_sub(MAPPED_BITS)?).ok().map(IpNet::V4),
        std::net::IpAddr::V6(address) => Ipv6Net::new(address, bits).ok().map(IpNet::V6),
    }
}

fn row_of(id: EndpointId, epoch: Epoch, sources: &SourcePrefixes) -> SourcesRow {
    let mut row = SourcesRow { epoch: epoch.0, endpoint_id: id.get(), ..SourcesRow::default() };
    for (slot, net) in row.prefixes.iter_mut().zip(sources.iter()) {
        *slot = prefix_of(net);
    }
    row
}

fn prefixes(row: &SourcesRow) -> String {
    row.prefixes.iter().filter_map(net_of).map(|net| net.to_string()).collect::<Vec<_>>().join(",")
}

fn in_words(row: &SourcesRow) -> String {
    format!("{} of endpoint {}, epoch {}", prefixes(row), row.endpoint_id, row.epoch)
}

impl Bpf {
    fn sources(&self) -> Result<HashMap<MapData, u32, SourcesRow>> {
        self.open_held(map::SOURCES)
    }

    /// Before the flag is set. The tables are locked.
    pub(super) fn ensure_sources(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()> {
        if spec.sources.is_empty() {
            return Ok(());
        }
        let row = row_of(id, spec.epoch, &spec.sources);
        let failed = |e: &MapError| wrap("write source prefixes", format!("endpoint {id}"), e);
        self.sources()?.insert(spec.host_ifindex.0, row, 0).map_err(|e| failed(&e))?;
        crash::point("datapath/config/after-sources");
        Ok(())
    }

    /// Without prefixes, or of a replaced link. The tables are locked.
    pub(super) fn remove_former_sources(&self, id: EndpointId, spec: &ConfigSpec) -> Result<()> {
        let is_kept = |ifindex| !spec.sources.is_empty() && ifindex == spec.host_ifindex.0;
        self.remove_sources(|ifindex, row| row.endpoint_id == id.get() && !is_kept(ifindex))
    }

    /// Whatever the epoch: without pins, no endpoint has the id.
    pub(super) fn remove_sources_of(&self, id: EndpointId) -> Result<()> {
        let _tables = self.lock_tables();
        self.remove_sources(|_, row| row.endpoint_id == id.get())
    }

    /// A successor's row stays. The tables are locked.
    pub(super) fn remove_sources_at(&self, ifindex: IfIndex, epoch: Epoch) -> Result<()> {
        let failed = |e: &MapError| wrap("remove source prefixes", format!("interface {ifindex}"), e);
        let mut rows = self.sources()?;
        match rows.get(&ifindex.0, 0) {
            Ok(row) if row.epoch == epoch.0 => unless_missing(rows.remove(&ifindex.0)).map_err(|e| failed(&e)),
            Ok(_) | Err(MapError::KeyNotFound) => Ok(()),
            Err(e) => Err(failed(&e)),
        }
    }

    fn remove_sources(&self, is_gone: impl Fn(u32, &SourcesRow) -> bool) -> Result<()> {
        let gone: Vec<u32> =
            self.source_rows()?.into_iter().filter(|(ifindex, row)| is_gone(*ifindex, row)).map(|(i, _)| i).collect();
        if gone.is_empty() {
            return Ok(());
        }
        let mut rows = self.sources()?;
        for ifindex in gone {
            unless_missing(rows.remove(&ifindex))
                .map_err(|e| wrap("remove source prefixes", format!("interface {ifindex}"), &e))?;
        }
        Ok(())
    }

    /// By interface index; empty after `remove_node`.
    pub(super) fn source_rows(&self) -> Result<Vec<(u32, SourcesRow)>> {
        let rows = self.read_held(map::SOURCES, |held| {
            let failed = |e: &MapError| wrap("read map", map::SOURCES, e);
            let sources: HashMap<&MapData, u32, SourcesRow> = HashMap::try_from(held).map_err(|e| failed(&e))?;
            let mut rows = Vec::new();
            for row in sources.iter() {
                match row {
                    Ok(row) => rows.push(row),
                    Err(e) if maps::is_missing(&e) => {}
                    Err(e) => return Err(failed(&e)),
                }
            }
            rows.sort_by_key(|(ifindex, _)| *ifindex);
            Ok(rows)
        })?;
        Ok(rows.unwrap_or_default())
    }

    /// Low halves, as programs store them.
    pub(super) fn source_epochs(&self) -> Result<BTreeSet<u32>> {
        let low = |epoch: u64| u32::try_from(epoch & u64::from(u32::MAX)).ok();
        Ok(self.source_rows()?.iter().filter_map(|(_, row)| low(row.epoch)).collect())
    }

    pub(super) fn dump_sources(&self) -> Result<Vec<Row>> {
        let columns = |(ifindex, sources): &(u32, SourcesRow)| {
            row([
                ("ifindex", ifindex.to_string()),
                ("endpoint", sources.endpoint_id.to_string()),
                ("epoch", sources.epoch.to_string()),
                ("prefixes", prefixes(sources)),
            ])
        };
        Ok(self.source_rows()?.iter().map(columns).collect())
    }

    pub(super) fn observe_sources(&self, record: &EndpointRecord, problems: &mut Vec<EndpointProblem>) -> Result<()> {
        if record.sources.is_empty() {
            return Ok(());
        }
        let want = row_of(record.id, record.epoch, &record.sources);
        let found = match self.sources()?.get(&record.host_ifindex.0, 0) {
            Ok(is) if is == want => return Ok(()),
            Ok(is) => in_words(&is),
            Err(MapError::KeyNotFound) => "none".to_owned(),
            Err(e) => return Err(wrap("read map", map::SOURCES, &e)),
        };
        problems.push(EndpointProblem::Config { field: "source prefixes", expected: in_words(&want), found });
        Ok(())
    }

    /// Except of other ABI versions' endpoints. The tables are locked.
    fn stray_sources(&self) -> Result<Vec<(u32, SourcesRow)>> {
        let rows = self.source_rows()?;
        if rows.is_empty() || self.is_covered() {
            return Ok(Vec::new());
        }
        let mut of_others = BTreeSet::new();
        for tree in self.pins.others()? {
            of_others.extend(tree.endpoint_ids()?);
        }
        let mut stray = Vec::new();
        for (ifindex, row) in rows {
            if !EndpointId::try_from(row.endpoint_id)
                .is_ok_and(|id| of_others.contains(&id) || self.has_sources(id, ifindex, &row).unwrap_or(true))
            {
                stray.push((ifindex, row));
            }
        }
        Ok(stray)
    }

    fn has_sources(&self, id: EndpointId, ifindex: u32, row: &SourcesRow) -> Result<bool> {
        match self.config(id) {
            Ok(is) => Ok(is.flags & FLAG_SOURCES != 0 && is.ifindex == ifindex && is.epoch == row.epoch),
            Err(e) if e.kind == KernelErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    pub(super) fn remove_stray_sources(&self) -> Result<()> {
        let _tables = self.lock_tables();
        let stray: BTreeSet<u32> = self.stray_sources()?.into_iter().map(|(ifindex, _)| ifindex).collect();
        if stray.is_empty() {
            return Ok(());
        }
        tracing::warn!(interfaces = ?stray, "source prefixes of no endpoint are removed");
        self.remove_sources(|ifindex, _| stray.contains(&ifindex))
    }

    pub(super) fn stray_source_problems(&self) -> Vec<NodeProblem> {
        let path = || self.pins.shared(map::SOURCES).display().to_string();
        let _tables = self.lock_tables();
        match self.stray_sources() {
            Ok(stray) => {
                let told = |(ifindex, row): &(u32, SourcesRow)| {
                    let cause = format!("the row of interface {ifindex} is of no endpoint: {}", in_words(row));
                    NodeProblem::Pin { path: path(), cause, repairable: true }
                };
                stray.iter().map(told).collect()
            }
            Err(e) => vec![NodeProblem::Pin { path: path(), cause: e.cause, repairable: false }],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(prefix: &SourcePrefix, address: &str) -> bool {
        let address = super::super::rows::key_of(address.parse().expect("an address")).addr;
        address.iter().zip(prefix.mask).zip(prefix.addr).all(|((byte, mask), addr)| byte & mask == addr)
    }

    #[test]
    fn a_prefix_reads_back_as_the_network_it_was_made_of() {
        for (text, inside, beside) in [
            ("10.200.0.0/16", "10.200.255.255", "10.201.0.0"),
            ("192.0.2.1/32", "192.0.2.1", "192.0.2.2"),
            ("128.0.0.0/1", "255.255.255.255", "127.255.255.255"),
            ("fd00:9::/64", "fd00:9::ffff:ffff:ffff:ffff", "fd00:9:0:1::"),
            ("2001:db8::1/128", "2001:db8::1", "2001:db8::"),
            ("2000::/3", "3fff::", "4000::"),
        ] {
            let net: IpNet = text.parse().expect("a network");
            let prefix = prefix_of(&net);
            assert_eq!(net_of(&prefix), Some(net), "{text}");
            assert!(contains(&prefix, inside) && !contains(&prefix, beside), "{text}");
            assert!(!contains(&prefix, "::") && !contains(&SourcePrefix::NONE, inside), "{text}");
        }
        assert_eq!(net_of(&SourcePrefix::NONE), None);
        assert_eq!(net_of(&SourcePrefix { addr: [0; 16], mask: [0xf0; 16] }), None);
    }
}
