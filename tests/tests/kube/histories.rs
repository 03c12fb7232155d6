//! Random histories of objects, faults and killed programs on two nodes: at the end, both agents have exactly the rows
//! that the final objects define.
//!
//! `WHARF_KUBE_SEED=N` plays other histories than the usual ones.

use std::{panic::resume_unwind, thread, time::Instant};

use anyhow::{Context, Result, anyhow};
use proptest::{
    prelude::*,
    strategy::ValueTree as _,
    test_runner::{Config, RngAlgorithm, TestRng, TestRunner},
};

use crate::{
    pair::Pair,
    steps::{Play, Step, step},
};

/// Pairs of nodes, side by side: most of the time, a history waits for delays of the programs.
const PAIRS: u64 = 5;
/// Histories of a pair, one after the other.
const HISTORIES: u64 = 6;
const STEPS: std::ops::Range<usize> = 5..35;

/// The steps of a seed's history.
fn steps(seed: u64, history: u64) -> Result<Vec<Step>> {
    let mut bytes = [0; 32];
    let numbers = seed.to_le_bytes().into_iter().chain(history.to_le_bytes());
    bytes.iter_mut().zip(numbers).for_each(|(byte, number)| *byte = number);
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let steps = prop::collection::vec(step(), STEPS).new_tree(&mut runner).map_err(|why| anyhow!("{why}"))?;
    Ok(steps.current())
}

fn play(pair: &mut Pair, steps: &[Step]) -> Result<()> {
    let mut play = Play::new(pair);
    for (n, step) in steps.iter().enumerate() {
        play.step(step).with_context(|| format!("step {n}, {step:?}"))?;
    }
    pair.server.heal();
    pair.settle()
}

fn histories(seed: u64, of_pair: u64) -> Result<()> {
    let mut pair = Pair::start()?;
    pair.settle().context("before the first history")?;
    for history in of_pair * HISTORIES..(of_pair + 1) * HISTORIES {
        let (steps, began) = (steps(seed, history)?, Instant::now());
        let played = play(&mut pair, &steps);
        eprintln!("seed {seed}, history {history}: {} steps, {:?}", steps.len(), began.elapsed());
        if let Err(why) = played {
            pair.print_logs();
            return Err(why.context(format!("WHARF_KUBE_SEED={seed}, history {history}: {steps:#?}")));
        }
    }
    pair.end()
}

#[test]
fn random_histories_end_with_the_rows_of_the_final_objects() -> Result<()> {
    let seed = std::env::var("WHARF_KUBE_SEED").ok().map(|text| text.parse()).transpose()?.unwrap_or(0);
    // Each thread has its own mount namespace.
    thread::scope(|scope| {
        let pairs: Vec<_> = (0..PAIRS).map(|pair| scope.spawn(move || histories(seed, pair))).collect();
        let ended = pairs.into_iter().map(|pair| pair.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.fold(Ok(()), Result::and)
    })
}
