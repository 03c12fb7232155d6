//! The steps of a history, and how histories are made.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest_state_machine::ReferenceStateMachine;
use wharf_core::{kernel::KernelErrorKind as Kind, state::Level};
use wharf_datapath::fake::Operation as Op;

/// The kernel's part of a create, in order.
pub(crate) const CREATE: [Op; 6] = [
    Op::EnsurePrograms,
    Op::EnsureLink,
    Op::EnsureConfig,
    Op::EnsureAttached,
    Op::EnsureConnected,
    Op::EnsureReachable,
];
/// The kernel's part of a delete, in order.
pub(crate) const DELETE: [Op; 5] =
    [Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink, Op::ReleaseLink];
/// Interfaces of all containers there ever are.
const CONTAINERS: u8 = 4;
const INTERFACES: u8 = 2;
const NETWORKS: u8 = 2;
/// Policy documents of all histories.
pub(crate) const DOCUMENTS: usize = 4;
/// Usable IPv4 addresses of the pool, the router's not among them.
pub(crate) const ADDRESSES: u8 = 5;

/// An interface of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Who {
    pub(crate) container: u8,
    pub(crate) interface: u8,
}

/// What happens to an operation while it runs.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Trouble {
    None,
    /// The kernel refuses one call, before or after its effect, and maybe one of the undo.
    Refused {
        at: Op,
        kind: Kind,
        undo: Option<Op>,
    },
    /// The agent is killed while the kernel does this.
    KilledAt(Op),
    /// The agent is killed when so many writes to the disk have passed. What the store had begun is written then, or
    /// cut off where it is.
    KilledAtWrite {
        after: u64,
        torn: bool,
    },
    /// The caller goes away while the kernel does this.
    CallerGone(Op),
}

/// A change of what policy wants.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PolicyStep {
    Import { document: usize, version: usize },
    Delete { document: usize },
    DeleteAll,
    Namespace { light: Option<bool> },
}

/// What happens to a change of policy.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Amid {
    Nothing,
    /// The kernel refuses this of its rows; the others before it are changed.
    RefusedAt(usize, Kind),
    /// The same, and the agent dies then.
    DiesAtRow(usize, Kind),
    /// The agent is killed while the kernel does this.
    KilledAt(Op),
    /// The caller goes away while the rows change.
    CallerGone,
}

/// What a deletion record says of the endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meant {
    /// Nothing: the shim found no mark.
    Any,
    /// The one that is there when it is written.
    ThisOne,
    /// One that was there before.
    AnEarlierOne,
}

/// A step of a history.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Add {
        who: Who,
        network: u8,
        exact: Option<u8>,
        trouble: Trouble,
    },
    Del {
        who: Who,
        network: u8,
        keep: bool,
        trouble: Trouble,
    },
    Gc {
        network: u8,
        valid: Vec<Who>,
    },
    /// Takes an address for a caller: any, or this one.
    Lease {
        exact: Option<u8>,
    },
    Release {
        address: u8,
    },
    Regenerate {
        who: Who,
        level: Level,
        trouble: Trouble,
    },
    Relabel {
        who: Who,
        label: u8,
        trouble: Trouble,
    },
    Policy {
        change: PolicyStep,
        amid: Amid,
    },
    /// The namespace of a container goes, with what is in it.
    LoseNamespace {
        container: u8,
    },
    /// A shim that found no agent leaves a deletion record; maybe the agent is told at once.
    Queue {
        who: Who,
        network: u8,
        meant: Meant,
        other_boot: bool,
        told: bool,
    },
    Drain,
    /// All rests are over, and the checks run.
    TimePasses,
    /// The proxy begins to listen on an address, or ends.
    Listen {
        address: u8,
        on: bool,
    },
    DiskFull,
    DiskMended,
    Repair,
    LeakAudit,
    /// A graceful stop and a start.
    Restart,
    /// A kill between two operations and a start, at which the kernel may refuse one kind of call.
    Crash {
        refuses: Option<Op>,
    },
    /// A kill, and another during the start that follows.
    CrashTwice {
        at: Op,
    },
}

impl Step {
    /// Rows of policy may be missing, or too many, until its controller comes.
    pub(crate) fn leaves_rows_to_the_controller(&self) -> bool {
        match self {
            Self::Add { trouble, .. } | Self::Del { trouble, .. } => {
                matches!(trouble, Trouble::Refused { at: Op::ChangePolicy, .. })
            }
            Self::Policy { amid, .. } => matches!(amid, Amid::RefusedAt(..) | Amid::CallerGone),
            _ => false,
        }
    }
}

fn who() -> impl Strategy<Value = Who> {
    (0..CONTAINERS, 0..INTERFACES).prop_map(|(container, interface)| Who { container, interface })
}

fn kind() -> impl Strategy<Value = Kind> {
    prop::sample::select(vec![Kind::Permission, Kind::Exhausted, Kind::NotFound, Kind::Conflict, Kind::Other])
}

/// Mostly nothing happens.
fn trouble(calls: &'static [Op]) -> impl Strategy<Value = Trouble> {
    let at = || prop::sample::select(calls);
    let undo = prop::option::weighted(0.2, prop::sample::select(&DELETE[..]));
    prop_oneof![
        6 => Just(Trouble::None),
        2 => (at(), kind(), undo).prop_map(|(at, kind, undo)| Trouble::Refused { at, kind, undo }),
        1 => at().prop_map(Trouble::KilledAt),
        1 => (0..16_u64, any::<bool>()).prop_map(|(after, torn)| Trouble::KilledAtWrite { after, torn }),
        1 => at().prop_map(Trouble::CallerGone),
    ]
}

/// The same; the rows of policy are written and removed on the way, too.
fn trouble_with_policy(calls: &'static [Op]) -> impl Strategy<Value = Trouble> {
    let refused = kind().prop_map(|kind| Trouble::Refused { at: Op::ChangePolicy, kind, undo: None });
    prop_oneof![12 => trouble(calls), 1 => refused, 1 => Just(Trouble::KilledAt(Op::ChangePolicy))]
}

fn policy_step() -> impl Strategy<Value = PolicyStep> {
    prop_oneof![
        6 => (0..DOCUMENTS, 0..2_usize).prop_map(|(document, version)| PolicyStep::Import { document, version }),
        2 => (0..DOCUMENTS).prop_map(|document| PolicyStep::Delete { document }),
        1 => Just(PolicyStep::DeleteAll),
        2 => any::<Option<bool>>().prop_map(|light| PolicyStep::Namespace { light }),
    ]
}

fn amid() -> impl Strategy<Value = Amid> {
    let row = || 0..40_usize;
    prop_oneof![
        8 => Just(Amid::Nothing),
        2 => (row(), kind()).prop_map(|(row, kind)| Amid::RefusedAt(row, kind)),
        2 => (row(), kind()).prop_map(|(row, kind)| Amid::DiesAtRow(row, kind)),
        2 => prop::sample::select(&[Op::ChangePolicy, Op::ObservePolicy][..]).prop_map(Amid::KilledAt),
        1 => Just(Amid::CallerGone),
    ]
}

/// Attachments that are there if nothing went amiss, with their networks: only so that most steps meet something.
#[derive(Debug, Clone, Default)]
pub(crate) struct Likely(BTreeMap<Who, u8>);

/// Makes histories. Every step may come at any time, so that a history can be shrunk to any part of it.
pub(crate) struct Histories;

impl ReferenceStateMachine for Histories {
    type State = Likely;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Likely> {
        Just(Likely::default()).boxed()
    }

    fn transitions(state: &Likely) -> BoxedStrategy<Step> {
        let network = || 0..NETWORKS;
        let address = || 0..ADDRESSES;
        let all: Vec<(Who, u8)> = state.0.iter().map(|(who, network)| (*who, *network)).collect();
        // One that is likely there, mostly, and any.
        let one = move || {
            let any = (who(), network());
            if all.is_empty() {
                any.boxed()
            } else {
                prop_oneof![4 => prop::sample::select(all.clone()), 1 => any].boxed()
            }
        };
        let builds =
            &[Op::EnsurePrograms, Op::EnsureConfig, Op::EnsureAttached, Op::EnsureConnected, Op::EnsureReachable];
        let level = prop_oneof![Just(Level::Policy), Just(Level::Datapath)];
        let meant = prop_oneof![3 => Just(Meant::ThisOne), 2 => Just(Meant::Any), 1 => Just(Meant::AnEarlierOne)];
        prop_oneof![
            10 => (who(), network(), prop::option::weighted(0.2, address()), trouble_with_policy(&CREATE))
                .prop_map(|(who, network, exact, trouble)| Step::Add { who, network, exact, trouble }),
            7 => (one(), prop::bool::weighted(0.2), trouble_with_policy(&DELETE))
                .prop_map(|((who, network), keep, trouble)| Step::Del { who, network, keep, trouble }),
            1 => (network(), prop::collection::vec(who(), 0..4))
                .prop_map(|(network, valid)| Step::Gc { network, valid }),
            1 => prop::option::of(address()).prop_map(|exact| Step::Lease { exact }),
            1 => address().prop_map(|address| Step::Release { address }),
            2 => (one(), level, trouble(builds))
                .prop_map(|((who, _), level, trouble)| Step::Regenerate { who, level, trouble }),
            1 => (one(), 0..3_u8, trouble(builds))
                .prop_map(|((who, _), label, trouble)| Step::Relabel { who, label, trouble }),
            4 => (policy_step(), amid()).prop_map(|(change, amid)| Step::Policy { change, amid }),
            1 => (0..CONTAINERS).prop_map(|container| Step::LoseNamespace { container }),
            3 => (one(), meant, prop::bool::weighted(0.1), any::<bool>())
                .prop_map(|((who, network), meant, other_boot, told)|
                    Step::Queue { who, network, meant, other_boot, told }),
            1 => Just(Step::Drain),
            1 => Just(Step::TimePasses),
            1 => (address(), any::<bool>()).prop_map(|(address, on)| Step::Listen { address, on }),
            1 => Just(Step::DiskFull),
            2 => Just(Step::DiskMended),
            1 => Just(Step::Repair),
            1 => Just(Step::LeakAudit),
            1 => Just(Step::Restart),
            2 => prop::option::weighted(0.5, prop::sample::select(&DELETE[..]))
                .prop_map(|refuses| Step::Crash { refuses }),
            1 => prop::sample::select(&[Op::Dump, Op::RemoveAttached, Op::RemoveLink, Op::RemovePrograms][..])
                .prop_map(|at| Step::CrashTwice { at }),
        ]
        .boxed()
    }

    fn apply(mut state: Likely, step: &Step) -> Likely {
        match step {
            Step::Add { who, network, .. } => {
                state.0.entry(*who).or_insert(*network);
            }
            Step::Del { who, .. } => {
                state.0.remove(who);
            }
            Step::Gc { network, valid } => state.0.retain(|who, of| of != network || valid.contains(who)),
            _ => {}
        }
        state
    }
}
