//! Fuzz targets for Wharf's input from outside.
//!
//! A module's `run` panics when a property is broken: a parser survives, accepted input follows the rules and survives
//! a round trip, and a refusal is short and clear. `fuzz_targets` passes libFuzzer's inputs, `tests/corpus.rs`
//! checked-in ones.

pub mod access_log;
pub mod cluster_file;
pub mod delegate_answer;
pub mod dns;
pub mod feed_messages;
pub mod feed_state;
pub mod feed_stream;
pub mod ipam_answer;
pub mod map_rows;
pub mod mark;
pub mod names_file;
pub mod netlink;
pub mod policy_documents;
pub mod pools_file;
pub mod queue_record;
pub mod redirects_file;
pub mod rest_body;
pub mod sandbox;
pub mod stdin;
pub mod store;
pub mod xds;

/// The first `count` lines, and the rest; missing lines are empty.
fn head(mut bytes: &[u8], count: usize) -> (Vec<&[u8]>, &[u8]) {
    let mut lines = Vec::with_capacity(count);
    for _ in 0..count {
        let end = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
        lines.push(&bytes[..end]);
        bytes = bytes.get(end + 1..).unwrap_or_default();
    }
    (lines, bytes)
}
