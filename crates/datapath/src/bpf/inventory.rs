//! Contents of pin tree and maps.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use aya::maps::{Array, HashMap, MapData, MapType};
use wharf_common::{
    FlowUse, ProxyUse, StackPathKey, StackPathRow,
    map::{
        self, FLAG_CHAINED, FLAG_LIMIT_EGRESS, FLAG_LIMIT_INGRESS, FLAG_LIVE, FLAG_LOCAL_BY_STACK, FLAG_SOURCES,
        FLAG_TRACE,
    },
};
use wharf_core::{
    ids::EndpointId,
    kernel::{EndpointTableRow, KernelDump, KernelErrorKind, MapInfo, Result},
};

use super::{
    Bpf, maps,
    pins::{self, LINKS, MAPS, PROGRAMS, PinTree, SHARED_MAPS, upcoming},
};
use crate::error::{fail, wrap};

pub(crate) type Row = BTreeMap<String, String>;

pub(crate) fn row<const N: usize>(columns: [(&str, String); N]) -> Row {
    columns.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn ipv4(octets: [u8; 4]) -> String {
    if octets == [0; 4] { String::new() } else { std::net::Ipv4Addr::from(octets).to_string() }
}

fn ipv6(octets: [u8; 16]) -> String {
    if octets == [0; 16] { String::new() } else { std::net::Ipv6Addr::from(octets).to_string() }
}

fn is_ours(name: &str) -> bool {
    LINKS.contains(&name)
        || MAPS.contains(&name)
        || PROGRAMS.iter().any(|program| *program == name || upcoming(program) == name)
}

impl PinTree {
    /// Contents first. In another version's tree every pin name counts as Wharf's.
    pub(crate) fn listing(&self) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
        let (mut ours, mut foreign) = (Vec::new(), Vec::new());
        let foreign_version = self.version() != wharf_common::abi::version();
        let shared = |name: &str| foreign_version || pins::is_shared(name);
        let of_endpoint = |name: &str| foreign_version || is_ours(name);
        let mut sort = |dir: &Path, known: &dyn Fn(&str) -> bool| -> Result<()> {
            let (mine, others): (Vec<_>, Vec<_>) = pins::names(dir)?.into_iter().partition(|name| known(name));
            ours.extend(mine.into_iter().map(|name| dir.join(name)).filter(|path| !path.is_dir()));
            foreign.extend(others.into_iter().map(|name| dir.join(name)));
            if dir.is_dir() {
                ours.push(dir.to_owned());
            }
            Ok(())
        };
        sort(&self.shared_dir(), &shared)?;
        let of_id = |name: &str| name.parse::<EndpointId>().is_ok();
        let of_link = |_: &str| true;
        for (parent, named) in [(self.endpoints_dir(), &of_id as &dyn Fn(&str) -> bool), (self.closing_dir(), &of_link)]
        {
            let is_directory = |name: &str| named(name) && parent.join(name).is_dir();
            for name in pins::names(&parent)?.iter().filter(|name| is_directory(name)) {
                sort(&parent.join(name), &of_endpoint)?;
            }
            sort(&parent, &is_directory)?;
        }
        sort(self.root(), &|name| ["shared", "endpoints", "closing"].contains(&name))?;
        Ok((ours, foreign))
    }
}

impl Bpf {
    /// Empty after `remove_node`.
    pub(crate) fn rows_if_any(&self) -> Result<Vec<EndpointTableRow>> {
        unless_removed(self.endpoint_rows())
    }

    /// Filled slots of `CALLS`; empty after `remove_node`.
    pub(crate) fn filled_slots(&self) -> Result<Vec<u32>> {
        Ok(unless_removed(self.call_slots())?.into_iter().map(|(slot, _)| slot).collect())
    }

    /// Foreign entries under the root are foreign pins.
    pub(crate) fn dump(&self) -> Result<KernelDump> {
        let mut dump = KernelDump { endpoint_rows: self.rows_if_any()?, ..KernelDump::default() };
        if self.is_covered() {
            // The pins may be another agent's.
            return Ok(dump);
        }
        self.dump_directories(&self.pins.endpoints_dir(), "", |name| name.parse::<EndpointId>().is_ok(), &mut dump)?;
        self.dump_directories(&self.pins.closing_dir(), "closing/", |_| true, &mut dump)?;
        let top = |name: &str| ["shared", "endpoints", "closing"].contains(&name);
        for (dir, ours) in
            [(self.pins.shared_dir(), &pins::is_shared as &dyn Fn(&str) -> bool), (self.pins.root().into(), &top)]
        {
            let foreign = pins::names(&dir)?.into_iter().filter(|name| !ours(name)).map(|name| dir.join(name));
            dump.foreign_pins.extend(foreign);
        }
        dump.foreign_pins.sort();
        Ok(dump)
    }

    fn dump_directories(
        &self,
        parent: &Path,
        prefix: &str,
        ours: impl Fn(&str) -> bool,
        dump: &mut KernelDump,
    ) -> Result<()> {
        for name in pins::names(parent)? {
            let dir = parent.join(&name);
            match fs::symlink_metadata(&dir) {
                Ok(entry) if ours(&name) && entry.is_dir() => {}
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Ok(_) | Err(_) => {
                    dump.foreign_pins.push(dir);
                    continue;
                }
            }
            let (mut known, foreign): (Vec<_>, Vec<_>) = pins::names(&dir)?.into_iter().partition(|n| is_ours(n));
            known.retain(|name| !PROGRAMS.iter().any(|program| upcoming(program) == *name));
            dump.foreign_pins.extend(foreign.into_iter().map(|n| dir.join(n)));
            dump.pins.push((format!("{prefix}{name}"), known));
        }
        Ok(())
    }

    pub(super) fn pinned_endpoints(&self) -> Result<Vec<EndpointId>> {
        let mut ids: Vec<EndpointId> =
            pins::names(&self.pins.endpoints_dir())?.iter().filter_map(|n| n.parse().ok()).collect();
        ids.sort();
        Ok(ids)
    }

    pub(crate) fn map_infos(&self) -> Result<Vec<MapInfo>> {
        let endpoints = self.pinned_endpoints()?;
        let mut slots = 0;
        for id in &endpoints {
            slots += usize::from(self.call_slot(u32::from(id.get()))?.is_some());
        }
        let mut infos = Vec::new();
        for name in SHARED_MAPS {
            let entries = match name {
                map::ENDPOINTS => Some(self.endpoint_rows()?.len()),
                // Only pinned endpoints' slots: reading all 16,384 takes 10 ms.
                map::CALLS => Some(slots),
                map::STACK_PATHS => Some(self.stack_paths()?.len()),
                map::SOURCES => Some(self.source_rows()?.len()),
                // The table may have half a million rows.
                map::FLOWS => Some(usize::try_from(self.flow_totals()?.rows).unwrap_or(usize::MAX)),
                _ => None,
            };
            infos.push(info(name.to_owned(), &self.held_data(name)?, entries)?);
        }
        for id in endpoints {
            for name in MAPS {
                let data = match maps::open(&self.pins.endpoint(id, name), name) {
                    Ok(data) => data,
                    Err(e) if e.kind == KernelErrorKind::NotFound => continue,
                    Err(e) => return Err(e),
                };
                let rows = data.info().map_err(|e| wrap("read map", name, &e))?.max_entries() as usize;
                infos.push(info(format!("{id}/{name}"), &data, Some(rows))?);
            }
        }
        Ok(infos)
    }

    pub(crate) fn dump_map(&self, name: &str) -> Result<Vec<Row>> {
        let unknown = || {
            let cause = "there is no such map; names are ENDPOINTS, CALLS, NODE_CALLS, STACK_PATHS, STACK_USERS, SOURCES, \
                         FLOW_USE, FLOW_TOTALS, PROXY_USE, IPCACHE, POLICY_PORTS, POLICY_CELLS, POLICY_SETS, POLICY_STATE, \
                         ADDRESS_GENERATIONS, <endpoint id>/CONFIG, <endpoint id>/METRICS, <endpoint id>/BANDWIDTH";
            fail("dump map", name, KernelErrorKind::NotFound, cause)
        };
        match name {
            map::ENDPOINTS => Ok(self
                .endpoint_rows()?
                .iter()
                .map(|r| {
                    row([
                        ("address", r.address.to_string()),
                        ("endpoint", r.endpoint_id.to_string()),
                        ("epoch", r.epoch.to_string()),
                        ("ifindex", r.ifindex.to_string()),
                        ("identity", r.identity.to_string()),
                        ("mac", r.mac.to_string()),
                    ])
                })
                .collect()),
            map::CALLS => Ok(self
                .call_slots()?
                .into_iter()
                .map(|(slot, program)| row([("slot", slot.to_string()), ("program", program.to_string())]))
                .collect()),
            map::NODE_CALLS => Ok(self
                .node_programs()?
                .into_iter()
                .filter_map(|(name, id)| Some(row([("program", name.to_owned()), ("id", id?.to_string())])))
                .collect()),
            map::STACK_PATHS => Ok(self.stack_paths()?.into_iter().map(|(key, path)| path_row(&key, &path)).collect()),
            map::STACK_USERS => self.stack_users(),
            map::SOURCES => self.dump_sources(),
            map::FLOW_USE => self.flow_uses(),
            map::PROXY_USE => self.proxy_uses(),
            map::FLOW_TOTALS => {
                let totals = self.flow_totals()?;
                Ok(vec![row([
                    ("rows", totals.rows.to_string()),
                    ("expired", totals.expired.to_string()),
                    ("orphaned", totals.orphaned.to_string()),
                    ("over_quota", totals.over_quota.to_string()),
                    ("no_room", totals.no_room.to_string()),
                    ("untracked", totals.untracked.to_string()),
                ])])
            }
            map::IPCACHE
            | map::POLICY_PORTS
            | map::POLICY_CELLS
            | map::POLICY_SETS
            | map::POLICY_STATE
            | map::ADDRESS_GENERATIONS => self.dump_policy(name),
            map::FLOWS | map::FLOWS_RECENT | map::FLOWS_NEW => {
                let cause = "look at flows with `wharf bpf ct list`";
                Err(fail("dump map", name, KernelErrorKind::Unsupported, cause))
            }
            map::FRAGMENT_SLOTS | map::FRAGMENTS => {
                let cause = "its rows are the ports of packets that are on their way";
                Err(fail("dump map", name, KernelErrorKind::Unsupported, cause))
            }
            map::FLOW_CACHE | map::FLOW_CACHE_ENDS => {
                let cause = "it belongs to a cache of FLOWS; look at flows with `wharf bpf ct list`";
                Err(fail("dump map", name, KernelErrorKind::Unsupported, cause))
            }
            map::PROFILES => {
                let cause = "its rows repeat what the programs read in <endpoint id>/CONFIG; look at that";
                Err(fail("dump map", name, KernelErrorKind::Unsupported, cause))
            }
            map::EVENTS => {
                let cause = "a ring buffer has no rows; watch it with `wharf monitor`";
                Err(fail("dump map", name, KernelErrorKind::Unsupported, cause))
            }
            _ => match name.split_once('/') {
                Some((id, kind)) => {
                    let id: EndpointId = id.parse().map_err(|_| unknown())?;
                    match kind {
                        map::CONFIG => Ok(vec![self.config_row(id)?]),
                        map::METRICS => self.metric_rows(id),
                        map::BANDWIDTH => self.bandwidth_rows(id),
                        _ => Err(unknown()),
                    }
                }
                None => Err(unknown()),
            },
        }
    }

    fn stack_paths(&self) -> Result<Vec<(StackPathKey, StackPathRow)>> {
        let paths: HashMap<_, StackPathKey, StackPathRow> = self.open_held(map::STACK_PATHS)?;
        // An eviction ends the iteration early or repeats rows.
        Ok(paths.iter().filter_map(std::result::Result::ok).take(map::STACK_PATHS_MAX as usize).collect())
    }

    /// Endpoints that have or had rows in `STACK_PATHS`.
    fn stack_users(&self) -> Result<Vec<Row>> {
        let epochs: Array<_, u64> = self.open_held(map::STACK_USERS)?;
        let mut users = Vec::new();
        for id in self.pinned_endpoints()? {
            let failed = |e: &(dyn std::error::Error + 'static)| wrap("read map", map::STACK_USERS, e);
            let epoch = epochs.get(&u32::from(id.get()), 0).map_err(|e| failed(&e))?;
            if epoch != 0 {
                let epoch = epoch & u64::from(u32::MAX);
                users.push(row([("endpoint", id.to_string()), ("epoch", epoch.to_string())]));
            }
        }
        Ok(users)
    }

    fn flow_uses(&self) -> Result<Vec<Row>> {
        let uses: Array<_, FlowUse> = self.open_held(map::FLOW_USE)?;
        let mut rows = Vec::new();
        for id in self.pinned_endpoints()? {
            let used = uses.get(&u32::from(id.get()), 0).map_err(|e| wrap("read map", map::FLOW_USE, &e))?;
            rows.push(row([
                ("endpoint", id.to_string()),
                ("rows", used.rows.to_string()),
                // Racing CPUs may leave it below zero.
                ("recent", used.recent.cast_signed().max(0).to_string()),
            ]));
        }
        Ok(rows)
    }

    fn proxy_uses(&self) -> Result<Vec<Row>> {
        let uses: Array<_, ProxyUse> = self.open_held(map::PROXY_USE)?;
        let read = |id: EndpointId| {
            let used = uses.get(&u32::from(id.get()), 0).map_err(|e| wrap("read map", map::PROXY_USE, &e))?;
            Ok(row([
                ("endpoint", id.to_string()),
                ("opened", used.opened.to_string()),
                ("limit", used.limit.to_string()),
            ]))
        };
        self.pinned_endpoints()?.into_iter().map(read).collect()
    }

    fn config_row(&self, id: EndpointId) -> Result<Row> {
        let c = self.config(id)?;
        let flags = [
            (FLAG_LIVE, "live"),
            (FLAG_TRACE, "trace"),
            (FLAG_LOCAL_BY_STACK, "local-by-stack"),
            (FLAG_LIMIT_INGRESS, "limit-ingress"),
            (FLAG_LIMIT_EGRESS, "limit-egress"),
            (FLAG_CHAINED, "chained"),
            (FLAG_SOURCES, "sources"),
        ];
        let flags: Vec<&str> = flags.iter().filter(|(bit, _)| c.flags & bit != 0).map(|(_, name)| *name).collect();
        Ok(row([
            ("epoch", c.epoch.to_string()),
            ("ifindex", c.ifindex.to_string()),
            ("flags", flags.join(",")),
            ("identity", c.identity.to_string()),
            ("ipv4", ipv4(c.ipv4)),
            ("gateway4", ipv4(c.gateway4)),
            ("ipv6", ipv6(c.ipv6)),
            ("gateway6", ipv6(c.gateway6)),
        ]))
    }

    fn metric_rows(&self, id: EndpointId) -> Result<Vec<Row>> {
        let rows = self.counters(id)?.into_iter().map(|c| {
            row([
                ("direction", c.direction),
                ("reason", c.reason),
                ("packets", c.packets.to_string()),
                ("bytes", c.bytes.to_string()),
            ])
        });
        Ok(rows.collect())
    }
}

fn path_row(key: &StackPathKey, path: &StackPathRow) -> Row {
    row([
        ("client", super::rows::address_of(&key.client).to_string()),
        ("server", super::rows::address_of(&key.server).to_string()),
        ("protocol", key.protocol.to_string()),
        ("port", u16::from_be(key.port).to_string()),
        ("client_epoch", path.client_epoch.to_string()),
        ("server_epoch", path.server_epoch.to_string()),
        ("ports", if key.port == 0 { path.ports.to_string() } else { String::new() }),
    ])
}

fn unless_removed<T>(rows: Result<Vec<T>>) -> Result<Vec<T>> {
    match rows {
        Err(e) if e.kind == KernelErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

fn info(name: String, data: &MapData, entries: Option<usize>) -> Result<MapInfo> {
    let info = data.info().map_err(|e| wrap("read map", &name, &e))?;
    let kind = info.map_type().ok();
    Ok(MapInfo {
        name,
        kind: kind.map_or("unknown", maps::kind_name).to_owned(),
        entries: entries.map(|n| n as u64),
        max_entries: u64::from(info.max_entries()),
        // Kernels 5.11 to 6.3 report 0 for a ring buffer.
        memlock_bytes: match maps::memlock(data.fd())? {
            0 if kind == Some(MapType::RingBuf) => u64::from(info.max_entries()),
            bytes => bytes,
        },
    })
}
