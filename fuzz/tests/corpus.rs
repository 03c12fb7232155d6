//! Runs checked-in inputs, and inputs near them, without libFuzzer. The inputs are the same in every run; `cargo xtask
//! fuzz` looks for new ones.

use std::{fs, path::Path};

use proptest::{
    prelude::{Strategy as _, any, prop},
    sample::Index,
    test_runner::{Config, RngSeed, TestRunner},
};

/// A change: position, number of removed bytes, and inserted bytes.
type Change = (Index, usize, Vec<u8>);

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let mut paths: Vec<_> =
        fs::read_dir(&directory).expect("the target's inputs").map(|entry| entry.expect("an input").path()).collect();
    // The order of directories differs between machines.
    paths.sort();
    assert!(!paths.is_empty(), "{} is empty", directory.display());
    paths.iter().map(|path| fs::read(path).expect("an input")).collect()
}

/// Words of `words.dict`, as escaped there.
fn words() -> Vec<Vec<u8>> {
    let lines = include_str!("../words.dict").lines();
    let quoted = lines.filter_map(|line| line.strip_prefix('"')?.strip_suffix('"'));
    quoted.map(|word| word.replace("\\\"", "\"").into_bytes()).collect()
}

fn change(input: &mut Vec<u8>, (at, gone, new): &Change) {
    let at = at.index(input.len() + 1);
    let end = (at + gone).min(input.len());
    input.splice(at..end, new.iter().copied());
}

/// Also runs `count` changed inputs.
fn replay(target: &str, count: u32, run: fn(&[u8])) {
    let corpus = corpus(target);
    for input in &corpus {
        run(input);
    }
    let put = proptest::prop_oneof![
        prop::collection::vec(any::<u8>(), 0..8),
        prop::sample::select(words()),
        // Two inputs in one.
        (prop::sample::select(corpus.clone()), any::<Index>()).prop_map(|(input, from)| {
            let from = from.index(input.len() + 1);
            input.get(from..).unwrap_or_default().to_vec()
        }),
    ];
    let changes = prop::collection::vec((any::<Index>(), 0_usize..16, put), 1..5);
    let inputs = (prop::sample::select(corpus), changes).prop_map(|(mut input, changes)| {
        changes.iter().for_each(|one| change(&mut input, one));
        input
    });
    let config = Config {
        cases: count,
        rng_seed: RngSeed::Fixed(1),
        failure_persistence: None,
        max_shrink_iters: 4_000,
        ..Config::default()
    };
    let ran = TestRunner::new(config).run(&inputs, |input| {
        run(&input);
        Ok(())
    });
    if let Err(error) = ran {
        panic!("{error}\nonce it is mended, fuzz/corpus/{target} is the input's place");
    }
}

macro_rules! targets {
    ($count:literal: $($target:ident)*) => {
        $(#[test]
        fn $target() {
            replay(stringify!($target), $count, wharf_fuzz::$target::run);
        })*
    };
}

targets! { 4_000: access_log cluster_file delegate_answer dns feed_messages ipam_answer map_rows mark names_file netlink policy_documents redirects_file rest_body }
targets! { 4_000: feed_state feed_stream pools_file sandbox stdin xds }
// They write files.
targets! { 1_000: queue_record }
targets! { 100: store }
