//! Rules that redirect: no document says them here, so the rows that an accepting rule made are changed.

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, HashMap, LpmTrie, Map, MapData, MapError, lpm_trie::Key};
use wharf_common::{
    ABI_VERSION, CellKey, CellRow, FlowKey, FlowRow, PolicyState, PortKey, SetsRow,
    flow::UDP,
    map,
    policy::{Hit, PORT_PREFIX_BITS},
};
use wharf_tests::{Attached, Node};

/// A side of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ingress,
    Egress,
}

fn data(node: &Node, name: &str) -> Result<MapData> {
    let path = node.dirs().bpffs.join(format!("wharf/v{ABI_VERSION}/shared/{name}"));
    MapData::from_pin(&path).with_context(|| format!("open {}", path.display()))
}

/// Gives all rules that let packets pass on this side of an endpoint another ruling, and lets flows be judged anew.
pub(crate) fn rule(node: &Node, end: &Attached, side: Side, ruling: u32) -> Result<()> {
    change(node, end, side, None, ruling)
}

/// As [`rule`], for those of one port of UDP.
pub(crate) fn rule_of_port(node: &Node, end: &Attached, side: Side, port: u16, ruling: u32) -> Result<()> {
    change(node, end, side, Some(port), ruling)
}

fn change(node: &Node, end: &Attached, side: Side, port: Option<u16>, ruling: u32) -> Result<()> {
    let sets: Array<MapData, SetsRow> = Map::Array(data(node, map::POLICY_SETS)?).try_into()?;
    let sets = sets.get(&u32::from(node.endpoint(end)?.id), 0)?;
    let set = if side == Side::Ingress { sets.ingress } else { sets.egress };
    let class = match port {
        Some(port) => {
            let classes: LpmTrie<MapData, PortKey, u32> = Map::LpmTrie(data(node, map::POLICY_PORTS)?).try_into()?;
            let key = PortKey { set, protocol: UDP, _pad: 0, port: port.to_be_bytes() };
            Some(classes.get(&Key::new(PORT_PREFIX_BITS + 16, key), 0).context("class of a port")?)
        }
        None => None,
    };
    let mut cells: HashMap<MapData, CellKey, CellRow> = Map::HashMap(data(node, map::POLICY_CELLS)?).try_into()?;
    let ours: Vec<_> = cells.iter().collect::<Result<Vec<_>, _>>()?;
    let mut changed = 0;
    for (key, mut row) in
        ours.into_iter().filter(|(key, _)| key.set == set && class.is_none_or(|class| key.port == class))
    {
        let accepts = |hit: &Hit| hit.rule != 0;
        if accepts(&row.rest) {
            row.rest.ruling = ruling;
            cells.insert(key, row, 0)?;
            changed += 1;
        }
    }
    ensure!(changed > 0, "no rule of set {set} lets packets pass");
    let mut state: Array<MapData, PolicyState> = Map::Array(data(node, map::POLICY_STATE)?).try_into()?;
    let now = state.get(&0, 0)?;
    Ok(state.set(0, PolicyState { generation: now.generation + 1, ..now }, 0)?)
}

/// Removes the rows of all flows, as a full table may.
pub(crate) fn forget_flows(node: &Node) -> Result<()> {
    let tables = [Map::HashMap(data(node, map::FLOWS)?), Map::LruHashMap(data(node, map::FLOWS_NEW)?)];
    for table in tables {
        let mut rows: HashMap<MapData, FlowKey, FlowRow> = table.try_into()?;
        let keys: Vec<_> = rows.keys().collect::<Result<_, _>>()?;
        for key in keys {
            match rows.remove(&key) {
                // Evicted meanwhile.
                Err(MapError::KeyNotFound) => {}
                removed => removed?,
            }
        }
    }
    Ok(())
}
