//! The policy tables: row changes, and observation.

mod rows;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::PoisonError,
};

use aya::maps::{Array, HashMap, LpmTrie, MapData, MapError, lpm_trie::Key};
use ipnet::IpNet;
use wharf_common::{
    CellKey, CellRow, EndpointKey, PeerRow, PolicyState, PortKey, SetsRow, map,
    policy::{POLICY_AUDITS, POLICY_KEEPS_FLOWS},
};
use wharf_core::{
    ids::{EndpointId, MAX_ENDPOINT_ID},
    kernel::{KernelError, KernelErrorKind, Result},
    policy::{Cell, Judged, Mode, PolicyRows, PortRange, RowChange},
};
use wharf_crash as crash;

use super::{Bpf, inventory::Row, maps, rows::key_of};
use crate::error::{fail, io_cause, wrap};

pub(crate) use rows::{Cause, peer_key, peer_of, port_key, port_of, readable, sound, subject};

const CHANGE: &str = "change policy";
const OBSERVE: &str = "observe policy";

/// In [`PolicyState::flags`]: a row change is under way. A later change that finds it follows an interrupted one
/// without a new generation.
const CHANGING: u32 = 1 << 31;

/// The row must not exist (`linux/bpf.h`).
const BPF_NOEXIST: u64 = 1;

struct Tables {
    peers: LpmTrie<MapData, EndpointKey, PeerRow>,
    peers_max: u32,
    ports: LpmTrie<MapData, PortKey, u32>,
    cells: HashMap<MapData, CellKey, CellRow>,
    sets: Array<MapData, SetsRow>,
    state: Array<MapData, PolicyState>,
    addresses: Array<MapData, u32>,
}

impl Bpf {
    /// Rows in order, then generations and mode. A failure after a row change also increments the generation.
    pub(crate) fn change_policy(&self, changes: &[RowChange], mode: Mode) -> Result<()> {
        // An abandoned call may meet the next one.
        let _one_at_a_time = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tables = self.policy_tables()?;
        let before = tables.state()?;
        let flags = flags_of(mode);
        if changes.is_empty() && before.flags == flags {
            return Ok(());
        }
        // Programs of other versions do not read the generations of addresses.
        let slots = if before.generation != 0 && before.flags == flags && self.pins.others()?.is_empty() {
            slots_of(changes)
        } else {
            None
        };
        let increased = generation_after(before.generation, before.flags & CHANGING != 0 || !changes.is_empty());
        if !changes.is_empty() {
            tables.set_state(PolicyState { flags: before.flags | CHANGING, ..before })?;
        }
        let mut any = false;
        for change in changes {
            if let Err(e) = tables.change(change) {
                let after = PolicyState { generation: increased, flags: before.flags & !CHANGING };
                return tables.set_state(if any { after } else { before }).and(Err(e));
            }
            any = true;
            crash::point("datapath/policy/after-row");
        }
        crash::point("datapath/policy/before-generation");
        let generation = match slots {
            Some(slots) => {
                self.increase_generations(slots)?;
                before.generation
            }
            None => increased,
        };
        tables.set_state(PolicyState { generation, flags })
    }

    /// After a change of rows about addresses in these slots. Nothing after `remove_node`.
    pub(super) fn increase_generations(&self, slots: impl IntoIterator<Item = u32>) -> Result<()> {
        let failed = |e: &MapError| wrap(CHANGE, map::ADDRESS_GENERATIONS, e);
        // Held meanwhile: no other increase is lost.
        let mut held = self.held();
        let Some(own) = held.iter_mut().find(|own| own.name == map::ADDRESS_GENERATIONS) else { return Ok(()) };
        let mut generations: Array<&mut MapData, u32> = Array::try_from(&mut own.map).map_err(|e| failed(&e))?;
        for slot in slots {
            let before = generations.get(&slot, 0).map_err(|e| failed(&e))?;
            generations.set(slot, before.wrapping_add(1), 0).map_err(|e| failed(&e))?;
        }
        Ok(())
    }

    pub(crate) fn observe_peer_rows(&self, ips: &[IpAddr]) -> Result<Vec<Option<PeerRow>>> {
        let peers: LpmTrie<MapData, EndpointKey, PeerRow> = self.open_held(map::IPCACHE)?;
        let row = |ip: &IpAddr| {
            let wrong = |cause: &str| fail(OBSERVE, ip.to_string(), KernelErrorKind::Other, cause);
            match peers.get(&peer_key((*ip).into()).map_err(wrong)?, 0) {
                Ok(row) => Ok(Some(row)),
                Err(e) if maps::is_missing(&e) => Ok(None),
                Err(e) => Err(wrap(OBSERVE, format!("{} of {ip}", map::IPCACHE), &e)),
            }
        };
        ips.iter().map(row).collect()
    }

    pub(crate) fn observe_policy(&self) -> Result<PolicyRows> {
        let tables = self.policy_tables()?;
        Ok(PolicyRows {
            sets: tables.sets()?,
            peers: tables.peers()?,
            ports: tables.ports()?,
            cells: tables.cells()?,
            generation: tables.state()?.generation,
        })
    }

    pub(crate) fn peers_max(&self) -> u32 {
        self.held_max(map::IPCACHE).unwrap_or(map::IPCACHE_MAX)
    }

    pub(super) fn dump_policy(&self, name: &str) -> Result<Vec<Row>> {
        let tables = self.policy_tables()?;
        Ok(match name {
            map::IPCACHE => tables.peers()?.iter().map(|(net, row)| readable::peer(net, row)).collect(),
            map::POLICY_PORTS => tables.ports()?.iter().map(|(range, class)| readable::ports(range, *class)).collect(),
            map::POLICY_CELLS => {
                tables.cells()?.iter().map(|(key, (cell, by))| readable::cell(key, cell, by)).collect()
            }
            map::POLICY_SETS => tables.sets()?.iter().map(|(id, row)| readable::sets(*id, row)).collect(),
            map::POLICY_STATE => {
                let state = tables.state()?;
                vec![readable::state(state.generation, mode_of(state.flags))]
            }
            map::ADDRESS_GENERATIONS => tables.addresses()?.into_iter().map(readable::address_generation).collect(),
            _ => Vec::new(),
        })
    }

    fn policy_tables(&self) -> Result<Tables> {
        Ok(Tables {
            peers: self.open_held(map::IPCACHE)?,
            peers_max: self.peers_max(),
            ports: self.open_held(map::POLICY_PORTS)?,
            cells: self.open_held(map::POLICY_CELLS)?,
            sets: self.open_held(map::POLICY_SETS)?,
            state: self.open_held(map::POLICY_STATE)?,
            addresses: self.open_held(map::ADDRESS_GENERATIONS)?,
        })
    }
}

impl Tables {
    fn change(&mut self, change: &RowChange) -> Result<()> {
        let invalid = |cause: Cause| fail(CHANGE, subject(change), KernelErrorKind::Other, cause);
        let changed = match *change {
            RowChange::Sets(id, row) => self.sets.set(u32::from(id.get()), row, 0),
            RowChange::Peer(net, row) => {
                let key = peer_key(net).map_err(invalid)?;
                match row {
                    Some(row) => self.peers.insert(&key, row, 0),
                    None => self.peers.remove(&key),
                }
            }
            RowChange::Ports(range, class) => {
                let key = port_key(&range).map_err(invalid)?;
                match class {
                    Some(class) => self.ports.insert(&key, class, 0),
                    None => self.ports.remove(&key),
                }
            }
            RowChange::Cell(key, None) => self.cells.remove(&key),
            RowChange::Cell(key, Some(cell)) => {
                sound(&cell).map_err(invalid)?;
                self.put_cell(&key, &cell)
            }
        };
        match changed {
            Err(e) if is_removal(change) && maps::is_missing(&e) => Ok(()),
            other => other.map_err(|e| refused(change, &e, self.peers_max)),
        }
    }

    /// Most cells are new. An existing cell keeps its counters, except packets counted meanwhile.
    fn put_cell(&mut self, key: &CellKey, cell: &Cell) -> std::result::Result<(), MapError> {
        let new = CellRow { admin: cell.admin, rest: cell.rest, packets: 0, bytes: 0 };
        match self.cells.insert(key, new, BPF_NOEXIST) {
            Err(MapError::SyscallError(e)) if e.io_error.raw_os_error() == Some(libc::EEXIST) => {}
            other => return other,
        }
        let there = self.cells.get(key, 0)?;
        let row = CellRow { packets: there.packets, bytes: there.bytes, ..new };
        if row == there { Ok(()) } else { self.cells.insert(key, row, 0) }
    }

    fn state(&self) -> Result<PolicyState> {
        self.state.get(&0, 0).map_err(|e| wrap(OBSERVE, map::POLICY_STATE, &e))
    }

    fn set_state(&mut self, state: PolicyState) -> Result<()> {
        self.state.set(0, state, 0).map_err(|e| wrap(CHANGE, map::POLICY_STATE, &e))
    }

    fn addresses(&self) -> Result<Vec<(u32, u32)>> {
        let rows = (0..).zip(self.addresses.iter());
        let read = rows.map(|(slot, row)| Ok((slot, row.map_err(|e| wrap(OBSERVE, map::ADDRESS_GENERATIONS, &e))?)));
        read.filter(|row| row.as_ref().is_ok_and(|(_, changes)| *changes != 0) || row.is_err()).collect()
    }

    fn sets(&self) -> Result<BTreeMap<EndpointId, SetsRow>> {
        let mut sets = BTreeMap::new();
        for id in (1..=MAX_ENDPOINT_ID).filter_map(|id| EndpointId::try_from(id).ok()) {
            let row = self.sets.get(&u32::from(id.get()), 0);
            let row = row.map_err(|e| wrap(OBSERVE, format!("{} of endpoint {id}", map::POLICY_SETS), &e))?;
            if row != SetsRow::default() {
                sets.insert(id, row);
            }
        }
        Ok(sets)
    }

    fn peers(&self) -> Result<BTreeMap<IpNet, PeerRow>> {
        read(map::IPCACHE, self.peers_max, self.peers.iter(), |key, row| Ok((peer_of(key)?, row)))
    }

    fn ports(&self) -> Result<BTreeMap<PortRange, u32>> {
        read(map::POLICY_PORTS, map::POLICY_PORTS_MAX, self.ports.iter(), |key, class| Ok((port_of(key)?, class)))
    }

    fn cells(&self) -> Result<BTreeMap<CellKey, (Cell, Judged)>> {
        read(map::POLICY_CELLS, map::POLICY_CELLS_MAX, self.cells.iter(), |key, row| {
            let cell = Cell { admin: row.admin, rest: row.rest };
            sound(&cell)?;
            Ok((*key, (cell, Judged { packets: row.packets, bytes: row.bytes })))
        })
    }
}

trait Raw {
    fn raw(&self) -> String;
}

impl Raw for Key<EndpointKey> {
    fn raw(&self) -> String {
        format!("the row of {}/{}", std::net::Ipv6Addr::from(self.data().addr), self.prefix_len())
    }
}

impl Raw for Key<PortKey> {
    fn raw(&self) -> String {
        let PortKey { set, protocol, port, .. } = self.data();
        let (port, length) = (u16::from_be_bytes(port), self.prefix_len());
        format!("the row of rule set {set}, protocol {protocol}, port {port}, {length} bits")
    }
}

impl Raw for CellKey {
    fn raw(&self) -> String {
        let Self { set, class, port } = self;
        format!("the row of rule set {set}, peer class {class}, port class {port}")
    }
}

/// `max` bounds the iteration, which a row's removal restarts.
fn read<K: Raw, V, A: Ord, B>(
    table: &'static str,
    max: u32,
    rows: impl Iterator<Item = std::result::Result<(K, V), MapError>>,
    row_of: impl Fn(&K, V) -> std::result::Result<(A, B), Cause>,
) -> Result<BTreeMap<A, B>> {
    let mut all = BTreeMap::new();
    for row in rows.take(max as usize) {
        let (key, value) = row.map_err(|e| wrap(OBSERVE, table, &e))?;
        let (key, value) = row_of(&key, value).map_err(|cause| {
            let cause =
                format!("{cause}: no agent of this version wrote it; unpin the table and start the agent again");
            fail(OBSERVE, format!("{} in {table}", key.raw()), KernelErrorKind::Conflict, cause)
        })?;
        all.insert(key, value);
    }
    Ok(all)
}

/// A change of mode may drop what the previous mode passed. Zero until the first policy, never again.
pub(crate) fn generation_after(before: u32, rows_changed: bool) -> u32 {
    if before == 0 && !rows_changed { 0 } else { before.checked_add(1).unwrap_or(1) }
}

/// `None` if a change concerns flows of more than single addresses.
pub(crate) fn slots_of(changes: &[RowChange]) -> Option<BTreeSet<u32>> {
    let slot = |change: &RowChange| match change {
        RowChange::Peer(net, _) if net.prefix_len() == net.max_prefix_len() => {
            Some(key_of(net.addr()).generation_slot())
        }
        _ => None,
    };
    changes.iter().map(slot).collect()
}

fn flags_of(mode: Mode) -> u32 {
    let bit = |set, bit| if set { bit } else { 0 };
    bit(mode.keeps_flows, POLICY_KEEPS_FLOWS) | bit(mode.audits, POLICY_AUDITS)
}

fn mode_of(flags: u32) -> Mode {
    let has = |bit| flags & bit != 0;
    Mode { keeps_flows: has(POLICY_KEEPS_FLOWS), audits: has(POLICY_AUDITS) }
}

fn is_removal(change: &RowChange) -> bool {
    matches!(change, RowChange::Peer(_, None) | RowChange::Ports(_, None) | RowChange::Cell(_, None))
}

fn refused(change: &RowChange, error: &MapError, peers_max: u32) -> KernelError {
    let mut told = wrap(CHANGE, subject(change), error);
    let (table, max) = match change {
        RowChange::Sets(..) => (map::POLICY_SETS, map::POLICY_SETS_MAX),
        RowChange::Peer(..) => (map::IPCACHE, peers_max),
        RowChange::Ports(..) => (map::POLICY_PORTS, map::POLICY_PORTS_MAX),
        RowChange::Cell(..) => (map::POLICY_CELLS, map::POLICY_CELLS_MAX),
    };
    let remedy = match io_cause(error).and_then(std::io::Error::raw_os_error) {
        // From a full hash and a full LPM trie.
        Some(libc::E2BIG | libc::ENOSPC) => {
            let boot = if table == map::IPCACHE && max < map::IPCACHE_MAX {
                format!("boot the node, after which it holds {}, ", map::IPCACHE_MAX)
            } else {
                String::new()
            };
            format!(
                "; {table} is full ({max} rows): {boot}remove policies, or let their rules name fewer networks and \
                 ports"
            )
        }
        Some(libc::ENOMEM) => "; the node is short of memory: free some, then try again".to_owned(),
        _ => return told,
    };
    told.cause.push_str(&remedy);
    told
}

#[cfg(test)]
mod tests {
    use std::io;

    use aya::sys::SyscallError;

    use super::*;

    #[test]
    fn a_generation_grows_and_is_never_zero_again() {
        assert_eq!([0, 7, u32::MAX].map(|before| generation_after(before, true)), [1, 8, 1]);
        assert_eq!([0, 7, u32::MAX].map(|before| generation_after(before, false)), [0, 8, 1], "of the mode alone");
    }

    #[test]
    fn a_mode_reads_back_from_its_flags() {
        for bits in 0..4_u32 {
            let mode = Mode { keeps_flows: bits & 1 != 0, audits: bits & 2 != 0 };
            assert_eq!(mode_of(flags_of(mode)), mode);
        }
        assert_eq!(mode_of(!0 << 2), Mode::default(), "bits of another version say nothing");
    }

    #[test]
    fn a_full_table_is_told_with_its_size_and_a_remedy() {
        let change = RowChange::Peer("10.0.0.0/8".parse().expect("a network"), Some(PeerRow::default()));
        for errno in [libc::E2BIG, libc::ENOSPC] {
            let io_error = io::Error::from_raw_os_error(errno);
            let error: MapError = SyscallError { call: "bpf_map_update_elem", io_error }.into();
            let told = refused(&change, &error, map::IPCACHE_MAX);
            assert_eq!(told.kind, KernelErrorKind::Exhausted);
            let of_version_5 = refused(&change, &error, map::IPCACHE_LEAST).to_string();
            assert!(
                of_version_5.contains("full (131072 rows): boot the node, after which it holds 524288"),
                "{of_version_5}"
            );
            assert!(!told.cause.contains("boot"), "{told}");
            for part in ["change policy", "10.0.0.0/8", "IPCACHE is full (524288 rows)", "remove policies"] {
                assert!(told.to_string().contains(part), "{part} is missing in: {told}");
            }
        }
        let io_error = io::Error::from_raw_os_error(libc::ENOMEM);
        let error: MapError = SyscallError { call: "bpf_map_update_elem", io_error }.into();
        let told = refused(&change, &error, map::IPCACHE_MAX);
        assert_eq!(told.kind, KernelErrorKind::Exhausted);
        assert!(told.cause.contains("short of memory") && !told.cause.contains("full"), "{told}");
    }
}
