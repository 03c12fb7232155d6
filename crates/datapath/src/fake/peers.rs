//! Routes to other nodes and the overlay, changed one object at a time in the real kernel's order.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use wharf_core::{
    finding::NodeProblem,
    kernel::{NextHop, NodeSpec, OverlayNode, OverlaySpec, PeerRoute},
};

/// Routes to other nodes, and the overlay.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peers {
    /// Next hops by destination.
    pub routes: BTreeMap<IpNet, NextHop>,
    /// Destinations of the unreachable routes.
    pub unreachable: BTreeSet<IpNet>,
    /// The overlay's device, without nodes.
    pub device: Option<OverlaySpec>,
    /// Rows of the overlay's filter by node name.
    pub rows: BTreeMap<String, OverlayNode>,
}

impl Peers {
    fn of(spec: &NodeSpec) -> Self {
        let routes: BTreeMap<IpNet, NextHop> = spec.peers.iter().map(|peer| (peer.to.trunc(), peer.via)).collect();
        let nodes = spec.overlay.iter().flat_map(|overlay| &overlay.nodes);
        Self {
            unreachable: routes.keys().copied().collect(),
            routes,
            device: spec.overlay.as_ref().map(|overlay| OverlaySpec { nodes: Vec::new(), ..overlay.clone() }),
            rows: nodes.map(|node| (node.name.clone(), node.clone())).collect(),
        }
    }

    /// Also removes its routes.
    pub fn remove_device(&mut self) {
        self.device = None;
        self.routes.retain(|_, via| matches!(via, NextHop::Direct(_)));
    }

    /// False if the specification needs more changes.
    pub(super) fn change(&mut self, spec: &NodeSpec, most: usize) -> bool {
        let wanted = Self::of(spec);
        for _ in 0..most {
            if !self.step(&wanted) {
                return true;
            }
        }
        *self == wanted
    }

    /// False without a change.
    fn step(&mut self, wanted: &Self) -> bool {
        // Without the device, the filter goes after it.
        if wanted.device.is_some() {
            if let Some(name) = self.rows.keys().find(|name| !wanted.rows.contains_key(*name)).cloned() {
                return self.rows.remove(&name).is_some();
            }
            if let Some((name, node)) = wanted.rows.iter().find(|(name, node)| self.rows.get(*name) != Some(*node)) {
                self.rows.insert(name.clone(), node.clone());
                return true;
            }
        }
        let port = |device: &Option<OverlaySpec>| device.as_ref().map(|device| device.port);
        if self.device.is_some() && port(&self.device) != port(&wanted.device) {
            self.remove_device();
            return true;
        }
        if self.device != wanted.device {
            self.device.clone_from(&wanted.device);
            return true;
        }
        if wanted.device.is_none() && !self.rows.is_empty() {
            self.rows.clear();
            return true;
        }
        if let Some(to) = wanted.unreachable.difference(&self.unreachable).next().copied() {
            return self.unreachable.insert(to);
        }
        if let Some((to, via)) = wanted.routes.iter().find(|(to, via)| self.routes.get(*to) != Some(*via)) {
            self.routes.insert(*to, *via);
            return true;
        }
        if let Some(to) = self.routes.keys().find(|to| !wanted.routes.contains_key(*to)).copied() {
            return self.routes.remove(&to).is_some();
        }
        let left = self.unreachable.difference(&wanted.unreachable).next().copied();
        left.is_some_and(|to| self.unreachable.remove(&to))
    }

    pub(super) fn list(&self) -> Vec<PeerRoute> {
        self.routes.iter().map(|(to, via)| PeerRoute { to: *to, via: *via }).collect()
    }

    pub(super) fn problems(&self, spec: &NodeSpec) -> Vec<NodeProblem> {
        let wanted = Self::of(spec);
        let all: BTreeSet<&IpNet> = self.routes.keys().chain(wanted.routes.keys()).collect();
        let mut wrong = Vec::new();
        for to in all {
            let (expected, found) = (wanted.routes.get(to).copied(), self.routes.get(to).copied());
            if expected != found {
                wrong.push(NodeProblem::PeerRoute { to: *to, expected, found });
            }
        }
        for to in self.unreachable.symmetric_difference(&wanted.unreachable) {
            wrong.push(NodeProblem::PeerUnreachable { to: *to, expected: wanted.unreachable.contains(to) });
        }
        if self.device != wanted.device || self.rows != wanted.rows {
            wrong.push(NodeProblem::Overlay { cause: "differs".to_owned(), repairable: true });
        }
        wrong
    }
}
