//! Histories of one node against a simple model of what must come of them.
//!
//! A history is a list of steps: attaches and detaches, repeated, of strangers, in the middle of which the kernel
//! refuses, the disk is full, the caller goes away or the agent is killed; leases to callers, labels, policies,
//! rebuilds, garbage collection, deletion records, restarts. The model knows, for each step, what may come of it: all
//! of it or nothing. After each step the agent's memory, its store and the kernel are held against the model; the rows
//! of policy against those of an engine that was just made.
//!
//! The histories are the same in every run; `WHARF_MODEL_CASES=N` plays N others, of the seed `WHARF_MODEL_SEED` if it
//! is set. `cargo xtask test` plays other ones for each commit, the same on every machine. A history that failed is
//! shrunk and kept in `regressions.txt`, and replayed first from then on.
//!
//! Routes to other nodes have histories and a model of their own (`nodes`): they do not depend on endpoints.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod expected;
mod history;
mod nodes;
mod play;
#[path = "../lifecycle/support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "made for the lifecycle tests, of which the model needs less")]
mod support;

use proptest::test_runner::{Config, FileFailurePersistence, RngSeed};
use proptest_state_machine::prop_state_machine;

use nodes::NodesPlay;
use play::Play;

/// Histories in a normal run: what a busy processor plays in about two minutes, in a debug build.
const CASES: u32 = 384;
/// Any number: it makes the histories of a normal run.
const SEED: u64 = 0x5768_6172_6600;

fn config() -> Config {
    let regressions = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/model/regressions.txt");
    let wanted = ["WHARF_MODEL_CASES", "PROPTEST_CASES"].iter().find_map(|name| std::env::var(name).ok());
    let wanted = wanted.map(|n| n.parse().expect("the number of cases is a number"));
    let seed = std::env::var("WHARF_MODEL_SEED").ok().map(|n| n.parse().expect("the seed is a number"));
    Config {
        cases: wanted.unwrap_or(CASES),
        rng_seed: match (seed, wanted) {
            (Some(seed), _) => RngSeed::Fixed(seed),
            (None, Some(_)) => RngSeed::Random,
            (None, None) => RngSeed::Fixed(SEED),
        },
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(regressions))),
        max_shrink_iters: 4_000,
        ..Config::default()
    }
}

/// A quarter of the histories: a step changes all nodes.
fn config_of_nodes() -> Config {
    let regressions = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/model/regressions-nodes.txt");
    let config = config();
    Config {
        cases: config.cases.div_ceil(4),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(regressions))),
        ..config
    }
}

prop_state_machine! {
    #![proptest_config(config())]

    #[test]
    fn whatever_happens_nothing_is_lost_and_nothing_leaked(sequential 1..40 => Play);
}

prop_state_machine! {
    #![proptest_config(config_of_nodes())]

    #[test]
    fn whatever_happens_routes_and_overlay_follow_from_the_nodes(sequential 1..30 => NodesPlay);
}
