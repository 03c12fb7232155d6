//! Conversion between rows of `wharf-policy` and the kernel.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use ipnet::IpNet;
use wharf_common::{
    CellKey, PeerRow, SetsRow,
    flow::{ICMP, ICMPV6, SCTP, TCP, UDP},
    policy::{self, NO_RANK, PORT_UNKNOWN},
};
use wharf_core::{
    ids::EndpointId,
    policy::{Cell, PolicyRows, PortRange, RowChange},
};
use wharf_policy::{
    compile::{
        self, Change, EndpointKey, Hit, Identity, Known, L4, Listener, ListenerId, PeerClass, PortClass, PortPrefix,
        RuleIndex, Ruling, SetId, Sets, Share, Tables,
    },
    model::{Direction, Origin},
    requests::{Requests, ServerName},
};

use crate::redirects::Listeners;

const _: () = assert!(SetId::DENIES == policy::SET_DENIES);

/// `owner` returns a prefix's [`PeerRow::identity`].
pub(crate) fn changes(changes: &[Change], owner: impl Fn(&IpNet, Identity) -> u32) -> Vec<RowChange> {
    let of = |change: &Change| {
        Some(match change {
            // Not in the kernel.
            Change::PutOrigin(..) | Change::DropOrigin(_) | Change::PutListener(..) | Change::DropListener(_) => {
                return None;
            }
            Change::PutSets(key, sets) => {
                RowChange::Sets(endpoint(*key)?, SetsRow { ingress: sets.ingress.0, egress: sets.egress.0 })
            }
            Change::DropSets(key) => RowChange::Sets(endpoint(*key)?, SetsRow::default()),
            Change::PutAddress(net, known) => {
                RowChange::Peer(*net, Some(PeerRow { identity: owner(net, known.identity), class: known.class.0 }))
            }
            Change::DropAddress(net) => RowChange::Peer(*net, None),
            Change::PutPorts(set, prefix, class) => RowChange::Ports(ports(*set, *prefix), Some(class.0)),
            Change::DropPorts(set, prefix) => RowChange::Ports(ports(*set, *prefix), None),
            Change::PutCell(set, key, cell) => {
                let cell = Cell { admin: hit(cell.admin), rest: hit(cell.rest) };
                RowChange::Cell(cell_key(*set, *key), Some(cell))
            }
            Change::DropCell(set, key) => RowChange::Cell(cell_key(*set, *key), None),
        })
    };
    changes.iter().filter_map(of).collect()
}

/// Removes unchanged peers, unless another change concerns them.
pub(crate) fn without_equal(mut rows: Vec<RowChange>, peers: &BTreeMap<IpNet, PeerRow>) -> Vec<RowChange> {
    let mut changes: HashMap<IpNet, usize> = HashMap::new();
    for row in &rows {
        if let RowChange::Peer(net, _) = row {
            *changes.entry(*net).or_default() += 1;
        }
    }
    let is_there = |net: &IpNet, row: &PeerRow| changes.get(net) == Some(&1) && peers.get(net) == Some(row);
    rows.retain(|row| !matches!(row, RowChange::Peer(net, Some(row)) if is_there(net, row)));
    rows
}

/// Identities and rule origins are unknown. A port that `listeners` lacks lets nothing pass.
pub(crate) fn tables(rows: &PolicyRows, listeners: &Listeners) -> Tables {
    let mut tables = Tables::default();
    let mut rules: BTreeMap<SetId, compile::Rows> = BTreeMap::new();
    for (id, SetsRow { ingress, egress }) in &rows.sets {
        let sets = Sets { ingress: SetId(*ingress), egress: SetId(*egress) };
        tables.sets.insert(key(*id), sets);
        for set in [sets.ingress, sets.egress].into_iter().filter(|set| *set != SetId::NONE) {
            rules.entry(set).or_default();
        }
    }
    for (net, PeerRow { class, .. }) in &rows.peers {
        tables.ipcache.insert(*net, Known { identity: UNKNOWN, class: PeerClass(*class) });
    }
    for (range, class) in &rows.ports {
        let Some(l4) = l4(range.protocol) else { continue };
        let prefix = PortPrefix { l4, first: range.first, length: range.length };
        rules.entry(SetId(range.set)).or_default().ports.insert(prefix, PortClass(*class));
    }
    let nowhere = Arc::new(Origin { file: "".into(), line: 0, document: "".into(), field: String::new() });
    for (CellKey { set, class, port }, (cell, _)) in &rows.cells {
        let read = |hit| match read_hit(hit) {
            // Another ruling there is damage.
            Some(hit) if *port == PORT_UNKNOWN && hit.ruling == Ruling::Deny => {
                Some(Hit { ruling: Ruling::DenyUnknown, ..hit })
            }
            hit => hit,
        };
        let of = compile::Cell { admin: read(cell.admin), rest: read(cell.rest) };
        for rule in [of.admin, of.rest].into_iter().flatten().filter_map(|hit| hit.rule) {
            tables.origins.insert(rule, Arc::clone(&nowhere));
        }
        if let Some(Ruling::Redirect { listener, .. }) = of.rest.map(|hit| hit.ruling) {
            *tables.redirects.entry((listener, SetId(*set))).or_default() += 1;
            let known = listeners.get(&listener.0).cloned();
            tables.listeners.entry(listener).or_insert_with(|| known.unwrap_or_else(|| Arc::new(unknown(listener))));
        }
        rules.entry(SetId(*set)).or_default().cells.insert((PeerClass(*class), PortClass(*port)), of);
    }
    tables.rules = rules.into_iter().map(|(set, rows)| (set, Arc::new(rows))).collect();
    tables
}

/// For an unsaved listener; unique, so that no other cell leads there.
fn unknown(port: ListenerId) -> Listener {
    let nobody = ServerName::Exact(format!("port-{}.invalid", port.0));
    let requests = Requests { server_names: [nobody].into(), ..Requests::default() };
    Listener { direction: Direction::Ingress, requests: Arc::new(requests), share: Share::default() }
}

/// No endpoint has it, so the engine considers each row changed; see [`without_equal`].
const UNKNOWN: Identity = Identity(u32::MAX);

/// An endpoint's key in the tables.
#[must_use]
pub fn key(id: EndpointId) -> EndpointKey {
    EndpointKey(id.get().into())
}

pub(crate) fn endpoint(key: EndpointKey) -> Option<EndpointId> {
    u16::try_from(key.0).ok().and_then(|id| EndpointId::try_from(id).ok())
}

const _: () = assert!(PortClass::UNKNOWN.0 == PORT_UNKNOWN);

/// Key of a cell in the kernel.
#[must_use]
pub fn cell_key(set: SetId, (class, port): (PeerClass, PortClass)) -> CellKey {
    CellKey { set: set.0, class: class.0, port: port.0 }
}

fn ports(set: SetId, PortPrefix { l4, first, length }: PortPrefix) -> PortRange {
    let protocol = match l4 {
        L4::Tcp => TCP,
        L4::Udp => UDP,
        L4::Sctp => SCTP,
        L4::Icmp => ICMP,
        L4::Icmp6 => ICMPV6,
    };
    PortRange { set: set.0, protocol, first, length }
}

fn l4(protocol: u8) -> Option<L4> {
    Some(match protocol {
        TCP => L4::Tcp,
        UDP => L4::Udp,
        SCTP => L4::Sctp,
        ICMP => L4::Icmp,
        ICMPV6 => L4::Icmp6,
        _ => return None,
    })
}

fn hit(hit: Option<Hit>) -> policy::Hit {
    let Some(Hit { rank, ruling, rule }) = hit else { return policy::Hit::NONE };
    let ruling = match ruling {
        Ruling::Accept => policy::ACCEPT,
        Ruling::Deny | Ruling::DenyUnknown => policy::DENY,
        Ruling::Pass => policy::PASS,
        Ruling::Redirect { listener, open } => policy::redirect(listener.0, open),
    };
    policy::Hit { rank, rule: rule.map_or(0, |rule| rule.0), ruling }
}

fn read_hit(hit: policy::Hit) -> Option<Hit> {
    let ruling = match hit.ruling & policy::RULING {
        policy::ACCEPT => Ruling::Accept,
        policy::PASS => Ruling::Pass,
        policy::REDIRECT => Ruling::Redirect {
            listener: ListenerId(u16::try_from(hit.ruling >> policy::REDIRECT_PORT_SHIFT).unwrap_or_default()),
            open: hit.ruling & policy::REDIRECT_OPEN != 0,
        },
        _ => Ruling::Deny,
    };
    (hit.rank != NO_RANK).then_some(Hit {
        rank: hit.rank,
        ruling,
        rule: (hit.rule != 0).then_some(RuleIndex(hit.rule)),
    })
}
