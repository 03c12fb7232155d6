//! Direct paths to other nodes, with `--routing auto`. Some networks deliver packets only for the nodes' own addresses.
//!
//! A path is probed until it has a verdict, valid for the other node's row and this node's addresses. A router address
//! also fails to answer before its agent's first start after a boot. So a failing path's router address first gets an
//! overlay route, on *trial*: an answer proves that the address and the overlay work, and the direct path is tested
//! again. Without an answer, the next trial requires twice the failures. Containers' packets take the direct path until
//! it is refused. Only refusals survive a restart ([`Refusals`]).
//!
//! | state | route of the router address | next state |
//! |---|---|---|
//! | direct | direct | trial, after consecutive failures of a path |
//! | trial | overlay | test, after an answer; direct, after consecutive failures |
//! | test | direct | refused, after consecutive failures; a path that answers is trusted |
//! | refused | overlay | |

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use serde::{Deserialize, Serialize};
use wharf_core::kernel::{NextHop, PeerRoute};

use crate::{
    nodes::{NodeRow, Nodes},
    routes::Destination,
};

/// Consecutive failed probes that refuse a path.
pub const FAILURES: u32 = 3;

/// Failed probes in a row that end a trial. The other node answers by the overlay only during its own trial, which
/// begins at another time, or after its verdict.
const TRIAL_FAILURES: u32 = 8;

/// Doublings of the failures: at most one trial in 192 probes.
const MAX_DOUBLED: u32 = 6;

/// Why packets to a near node take the overlay.
pub const REFUSED: &str = "the direct path does not carry containers' addresses";

/// Nodes reached by the overlay despite a direct path, with the reason.
pub type Detours = BTreeMap<String, &'static str>;

/// A direct path to another node, in one family.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path {
    /// The other node.
    pub node: String,
    /// This node's router address.
    pub from: IpAddr,
    /// The other node's router address. Its kernel answers without an agent.
    pub router: IpAddr,
    /// Next hop: an address of the other node.
    pub hop: IpAddr,
}

/// Results of a probe; `None` for an unsent packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probed {
    /// Probed path.
    pub path: Path,
    /// The router address answered.
    pub router: Option<bool>,
    /// The next hop answered.
    pub hop: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Direct,
    Trial,
    Test,
    Refused,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Number of consecutive failures.
    Failed(u32),
    Trusted,
}

#[derive(Debug, Clone)]
struct Known {
    row: NodeRow,
    state: State,
    /// Verdict of each path since the state began.
    paths: BTreeMap<Path, Verdict>,
    /// Trials without an answer.
    trials: u32,
    /// The state is new: either route may have carried this round's probes.
    is_new: bool,
}

impl Known {
    fn new(row: &NodeRow) -> Self {
        Self { row: row.clone(), state: State::Direct, paths: BTreeMap::new(), trials: 0, is_new: false }
    }

    /// Consecutive failures that end the state.
    fn failures(&self) -> u32 {
        match self.state {
            State::Direct => FAILURES << self.trials.min(MAX_DOUBLED),
            State::Trial => TRIAL_FAILURES,
            State::Test | State::Refused => FAILURES,
        }
    }

    fn enter(&mut self, state: State) {
        (self.state, self.is_new) = (state, true);
        self.paths.retain(|_, verdict| *verdict == Verdict::Trusted);
    }

    fn take(&mut self, Probed { path, router, hop }: &Probed) {
        let before = match self.paths.get(path) {
            Some(Verdict::Trusted) => return,
            Some(Verdict::Failed(times)) => *times,
            None => 0,
        };
        let times = match (router, hop) {
            (Some(true), _) if self.state == State::Trial => return self.enter(State::Test),
            (Some(true), _) => {
                self.paths.insert(path.clone(), Verdict::Trusted);
                return;
            }
            (Some(false), Some(true)) => before + 1,
            _ if self.state == State::Trial => before + 1,
            // The node or a link may be down.
            _ => 0,
        };
        self.paths.insert(path.clone(), Verdict::Failed(times));
        if times < self.failures() {
            return;
        }
        match self.state {
            State::Direct => self.enter(State::Trial),
            State::Trial => {
                self.trials += 1;
                self.enter(State::Direct);
            }
            State::Test => self.enter(State::Refused),
            State::Refused => {}
        }
    }
}

/// Refused paths, for the next start. Void for another row of the other node, or other addresses of this node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusals {
    /// This node's addresses; empty without a refused path.
    own: Vec<IpAddr>,
    /// Other nodes' rows, by name.
    nodes: Vec<NodeRow>,
}

/// Verdicts by node name.
#[derive(Debug, Clone, Default)]
pub struct Verdicts {
    /// This node's addresses.
    own: Vec<IpAddr>,
    nodes: BTreeMap<String, Known>,
}

fn by_name(nodes: &Nodes) -> BTreeMap<&str, &NodeRow> {
    nodes.iter().map(|row| (row.name.as_str(), row)).collect()
}

impl Verdicts {
    /// Restores an earlier start's refusals. The first [`Verdicts::follow`] forgets void ones.
    #[must_use]
    pub fn restore(Refusals { own, nodes }: Refusals) -> Self {
        let known = |row: NodeRow| (row.name.clone(), Known { state: State::Refused, ..Known::new(&row) });
        Self { own, nodes: nodes.into_iter().map(known).collect() }
    }

    /// For [`Verdicts::restore`].
    #[must_use]
    pub fn refusals(&self) -> Refusals {
        let nodes: Vec<NodeRow> = self.refused().cloned().collect();
        let own = if nodes.is_empty() { Vec::new() } else { self.own.clone() };
        Refusals { own, nodes }
    }

    /// Whether [`Verdicts::refusals`] returns these.
    #[must_use]
    pub fn has(&self, refusals: &Refusals) -> bool {
        let is_own = refusals.nodes.is_empty() || refusals.own == self.own;
        is_own && self.refused().eq(&refusals.nodes)
    }

    fn refused(&self) -> impl Iterator<Item = &NodeRow> {
        self.nodes.values().filter(|known| known.state == State::Refused).map(|known| &known.row)
    }

    /// Forgets verdicts for changed rows, or all if this node's addresses (`own`) changed.
    pub fn follow(&mut self, nodes: &Nodes, own: &[IpAddr]) {
        if self.own != own {
            *self = Self { own: own.to_vec(), nodes: BTreeMap::new() };
            return;
        }
        let rows = by_name(nodes);
        self.nodes.retain(|name, known| rows.get(name.as_str()).is_some_and(|row| **row == known.row));
    }

    /// Paths without a verdict, to nodes with router addresses. `trials`: the kernel's trial routes; a path whose state
    /// requires another route is excluded. `routers`: this node's.
    #[must_use]
    pub fn open(
        &self,
        nodes: &Nodes,
        destinations: &[Destination],
        trials: &[PeerRoute],
        routers: &[IpAddr],
    ) -> Vec<Path> {
        let rows = by_name(nodes);
        let path = |to: &Destination| {
            let Ok(NextHop::Direct(hop)) = to.via else { return None };
            let row = rows.get(to.node.as_str())?;
            let router = *row.router_addresses.iter().find(|address| to.cidr.contains(*address))?;
            let is_on_trial = self.nodes.get(&to.node).is_some_and(|known| known.state == State::Trial);
            if trials.iter().any(|trial| trial.to.addr() == router) != is_on_trial {
                return None;
            }
            let from = *routers.iter().find(|address| address.is_ipv4() == router.is_ipv4())?;
            Some(Path { node: to.node.clone(), from, router, hop })
        };
        destinations.iter().filter_map(path).filter(|path| !self.is_trusted(path)).collect()
    }

    fn is_trusted(&self, path: &Path) -> bool {
        self.nodes.get(&path.node).is_some_and(|known| known.paths.get(path) == Some(&Verdict::Trusted))
    }

    /// Trial routes to router addresses. `overlaid`: the destinations if the nodes on trial were refused.
    #[must_use]
    pub fn trial_routes(nodes: &Nodes, trials: &Detours, overlaid: &[Destination]) -> Vec<PeerRoute> {
        let rows = by_name(nodes);
        let route = |to: &Destination| {
            let row = rows.get(to.node.as_str()).filter(|_| trials.contains_key(&to.node))?;
            let router = *row.router_addresses.iter().find(|address| to.cidr.contains(*address))?;
            Some(PeerRoute { to: router.into(), via: *to.via.as_ref().ok()? })
        };
        overlaid.iter().filter_map(route).collect()
    }

    /// Takes results of a round of probes. Returns whether routes change.
    pub fn judge(&mut self, nodes: &Nodes, probed: &[Probed]) -> bool {
        let rows = by_name(nodes);
        let (mut changed, mut renewed) = (BTreeSet::new(), BTreeSet::new());
        for probed in probed {
            let path = &probed.path;
            let Some(row) = rows.get(path.node.as_str()) else { continue };
            // The row changed after the probe was sent.
            if !row.router_addresses.contains(&path.router) || !row.addresses.contains(&path.hop) {
                continue;
            }
            let known = self.nodes.entry(path.node.clone()).or_insert_with(|| Known::new(row));
            if known.is_new {
                renewed.insert(path.node.clone());
            } else if known.state != State::Refused && !changed.contains(&path.node) {
                let before = known.state;
                known.take(probed);
                if known.state != before {
                    changed.insert(path.node.clone());
                }
            }
        }
        for name in renewed {
            self.nodes.entry(name).and_modify(|known| known.is_new = false);
        }
        !changed.is_empty()
    }

    /// Nodes that packets reach by the overlay.
    #[must_use]
    pub fn detours(&self) -> Detours {
        self.refused().map(|row| (row.name.clone(), REFUSED)).collect()
    }

    /// Nodes on trial.
    #[must_use]
    pub fn trials(&self) -> Detours {
        let on_trial = self.nodes.iter().filter(|(_, known)| known.state == State::Trial);
        on_trial.map(|(name, _)| (name.clone(), REFUSED)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().expect("address")
    }

    fn row(name: &str, n: u8, routers: &[&str]) -> NodeRow {
        NodeRow {
            name: name.to_owned(),
            addresses: vec![ip(&format!("192.0.2.{n}")), ip(&format!("2001:db8::{n}"))],
            pod_cidrs: vec![
                format!("10.{n}.0.0/16").parse().expect("CIDR"),
                format!("fd00:{n}::/64").parse().expect("CIDR"),
            ],
            health_addresses: Vec::new(),
            router_addresses: routers.iter().map(|address| ip(address)).collect(),
        }
    }

    fn nodes() -> Nodes {
        let rows = vec![row("a", 1, &[]), row("b", 2, &["10.2.0.1", "fd00:2::1"]), row("c", 3, &[])];
        Nodes::new(rows).expect("nodes")
    }

    fn direct(nodes: &Nodes) -> Vec<Destination> {
        let to = |row: &NodeRow| {
            let ways = row.pod_cidrs.iter().zip(&row.addresses);
            ways.map(|(cidr, hop)| Destination { node: row.name.clone(), cidr: *cidr, via: Ok(NextHop::Direct(*hop)) })
                .collect::<Vec<_>>()
        };
        nodes.iter().filter(|row| row.name != "a").flat_map(to).collect()
    }

    fn open(verdicts: &Verdicts) -> Vec<Path> {
        verdicts.open(&nodes(), &direct(&nodes()), &[], &[ip("10.1.0.1"), ip("fd00:1::1")])
    }

    fn results(path: &Path, router: Option<bool>, hop: Option<bool>) -> [Probed; 1] {
        [Probed { path: path.clone(), router, hop }]
    }

    const LOST: (Option<bool>, Option<bool>) = (Some(false), Some(true));

    #[test]
    fn direct_paths_to_nodes_with_router_addresses_are_open() {
        let [v4, v6] = open(&Verdicts::default()).try_into().expect("a path for each family");
        let expected =
            Path { node: "b".to_owned(), from: ip("10.1.0.1"), router: ip("10.2.0.1"), hop: ip("192.0.2.2") };
        assert_eq!(v4, expected);
        assert_eq!((v6.router, v6.hop), (ip("fd00:2::1"), ip("2001:db8::2")));
        let only_v4 = Verdicts::default().open(&nodes(), &direct(&nodes()), &[], &[ip("10.1.0.1")]);
        assert_eq!(only_v4, [v4]);
        let overlay = NextHop::Overlay { remote: ip("192.0.2.2"), local: None };
        let by_overlay: Vec<_> =
            direct(&nodes()).into_iter().map(|to| Destination { via: Ok(overlay), ..to }).collect();
        assert!(Verdicts::default().open(&nodes(), &by_overlay, &[], &[ip("10.1.0.1")]).is_empty());
    }

    fn lost(verdicts: &mut Verdicts, path: &Path, times: u32) -> bool {
        let mut last = false;
        for _ in 0..times {
            assert!(!last, "no further failure is needed");
            last = verdicts.judge(&nodes(), &results(path, LOST.0, LOST.1));
        }
        last
    }

    fn path_of(verdicts: &Verdicts, via: fn(&NodeRow) -> NextHop) -> Path {
        let to = |to: Destination| {
            let via = via(nodes().get(&to.node).expect("row"));
            Destination { via: Ok(via), ..to }
        };
        let to: Vec<_> = direct(&nodes()).into_iter().map(to).collect();
        let overlaid =
            [PeerRoute { to: "10.2.0.1/32".parse().expect("address"), via: over(nodes().get("b").expect("row")) }];
        let (on_trial, other) = (&overlaid[..], &[][..]);
        let (trials, others) = if verdicts.trials().is_empty() { (other, on_trial) } else { (on_trial, other) };
        let open = |trials| verdicts.open(&nodes(), &to, trials, &[ip("10.1.0.1")]);
        assert!(open(others).is_empty(), "the kernel has the route of another state");
        open(trials).swap_remove(0)
    }

    fn over(row: &NodeRow) -> NextHop {
        NextHop::Overlay { remote: row.addresses[0], local: None }
    }

    fn near(row: &NodeRow) -> NextHop {
        NextHop::Direct(row.addresses[0])
    }

    #[test]
    fn an_answer_is_trusted_and_failures_count_in_a_row() {
        let mut verdicts = Verdicts::default();
        let [v4, v6] = open(&verdicts).try_into().expect("paths");
        verdicts.judge(&nodes(), &results(&v4, Some(true), Some(false)));
        assert_eq!(open(&verdicts), std::slice::from_ref(&v6));
        // A failure counts only while the next hop answers.
        for (router, hop) in [LOST, LOST, (Some(false), Some(false)), LOST, LOST, (None, Some(true)), LOST, LOST] {
            assert!(!verdicts.judge(&nodes(), &results(&v6, router, hop)));
        }
        assert!(lost(&mut verdicts, &v6, 1), "one family is enough");
        assert!(verdicts.detours().is_empty(), "containers' packets take the direct path");
        assert!(verdicts.trials().contains_key("b"));
        let overlaid: Vec<_> = direct(&nodes())
            .into_iter()
            .map(|to| Destination { via: Ok(over(nodes().get(&to.node).expect("row"))), ..to })
            .collect();
        let routes = Verdicts::trial_routes(&nodes(), &verdicts.trials(), &overlaid);
        assert_eq!(
            routes.iter().map(|route| route.to.to_string()).collect::<Vec<_>>(),
            ["10.2.0.1/32", "fd00:2::1/128"]
        );
    }

    fn refused() -> Verdicts {
        let mut verdicts = Verdicts::default();
        verdicts.follow(&nodes(), &[ip("192.0.2.1")]);
        let direct = path_of(&verdicts, near);
        assert!(lost(&mut verdicts, &direct, FAILURES));
        let overlay = path_of(&verdicts, near);
        let answered = results(&overlay, Some(true), Some(true));
        assert!(!verdicts.judge(&nodes(), &answered), "the direct route may have carried it");
        assert!(verdicts.judge(&nodes(), &answered));
        assert!(verdicts.detours().is_empty(), "the direct path is tested");
        assert!(!lost(&mut verdicts, &direct, FAILURES));
        assert!(lost(&mut verdicts, &direct, 1));
        assert_eq!(verdicts.detours(), [("b".to_owned(), REFUSED)].into());
        assert!(!lost(&mut verdicts, &direct, 1), "reported once");
        verdicts
    }

    #[test]
    fn a_path_is_refused_after_an_answer_by_the_overlay_alone() {
        refused();
        let mut verdicts = Verdicts::default();
        let mut needed = FAILURES;
        for _ in 0..3 {
            let direct = path_of(&verdicts, near);
            assert!(lost(&mut verdicts, &direct, needed));
            let overlay = path_of(&verdicts, near);
            assert!(lost(&mut verdicts, &overlay, TRIAL_FAILURES + 1), "and the first round");
            assert!(verdicts.detours().is_empty(), "the node may not be there yet");
            verdicts.judge(&nodes(), &results(&direct, LOST.0, LOST.1));
            needed *= 2;
        }
        let direct = path_of(&verdicts, near);
        verdicts.judge(&nodes(), &results(&direct, Some(true), Some(true)));
        assert_eq!(open(&verdicts).len(), 1, "the other family's");
    }

    #[test]
    fn an_answer_in_the_test_is_trusted() {
        let mut verdicts = Verdicts::default();
        let direct = path_of(&verdicts, near);
        lost(&mut verdicts, &direct, FAILURES);
        let answered = |verdicts: &mut Verdicts, path: &Path| {
            for _ in 0..2 {
                verdicts.judge(&nodes(), &results(path, Some(true), Some(true)));
            }
        };
        let overlay = path_of(&verdicts, near);
        answered(&mut verdicts, &overlay);
        answered(&mut verdicts, &direct);
        assert!(verdicts.detours().is_empty() && verdicts.is_trusted(&direct));
    }

    #[test]
    fn a_verdict_ends_with_the_row_or_the_addresses_of_this_node() {
        let mut verdicts = refused();
        let changed = vec![row("a", 1, &["10.1.0.1"]), row("b", 2, &["10.2.0.1", "fd00:2::1"])];
        verdicts.follow(&Nodes::new(changed).expect("nodes"), &[ip("192.0.2.1")]);
        assert!(!verdicts.detours().is_empty(), "other rows have changed");
        let changed = vec![row("a", 1, &[]), row("b", 2, &["10.2.0.1"])];
        verdicts.follow(&Nodes::new(changed).expect("nodes"), &[ip("192.0.2.1")]);
        assert!(verdicts.detours().is_empty());
        let mut verdicts = refused();
        verdicts.follow(&nodes(), &[ip("192.0.2.7")]);
        assert!(verdicts.detours().is_empty());
    }

    #[test]
    fn a_restored_refusal_is_in_force_until_the_row_or_the_addresses_of_this_node_change() {
        let own = [ip("192.0.2.1")];
        let kept = refused().refusals();
        let restored = |nodes: &Nodes, own: &[IpAddr]| {
            let mut verdicts = Verdicts::restore(kept.clone());
            verdicts.follow(nodes, own);
            verdicts
        };
        let mut verdicts = restored(&nodes(), &own);
        assert_eq!(verdicts.detours(), [("b".to_owned(), REFUSED)].into());
        assert!(verdicts.has(&kept) && !verdicts.has(&Refusals::default()));
        assert_eq!(verdicts.refusals(), kept);
        assert!(verdicts.trials().is_empty());
        let path = open(&Verdicts::default()).swap_remove(0);
        for router in [true, false, false, false, true] {
            assert!(!verdicts.judge(&nodes(), &results(&path, Some(router), Some(true))));
        }
        assert!(verdicts.has(&kept), "a late result changes nothing");

        let changed = Nodes::new(vec![row("a", 1, &[]), row("b", 2, &["10.2.0.1"])]).expect("nodes");
        for verdicts in [restored(&changed, &own), restored(&nodes(), &[ip("192.0.2.7")])] {
            assert!(verdicts.detours().is_empty(), "void");
            assert!(verdicts.has(&Refusals::default()) && !verdicts.has(&kept));
            assert_eq!(verdicts.refusals(), Refusals::default());
        }
        let mut none = Verdicts::restore(Refusals::default());
        none.follow(&nodes(), &own);
        assert!(none.has(&Refusals::default()) && open(&none).len() == 2);
    }

    #[test]
    fn a_result_of_an_earlier_row_has_no_effect() {
        let mut verdicts = Verdicts::default();
        let path = open(&verdicts).swap_remove(0);
        let changed = Nodes::new(vec![row("a", 1, &[]), row("b", 2, &["10.2.0.9"])]).expect("nodes");
        for _ in 0..FAILURES {
            assert!(!verdicts.judge(&changed, &results(&path, LOST.0, LOST.1)));
        }
    }
}
