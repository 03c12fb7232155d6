//! What Wharf reads from outside, and what must be true of it whatever the bytes are.
//!
//! | target | bytes |
//! |---|---|
//! | [`stdin`] | the shim's environment and network configuration |
//! | [`rest_body`] | bodies, ids and queries of the agent's REST API |
//! | [`queue_record`] | files in the deletion queue |
//! | [`store`] | the agent's store: the file, and the rows in it |
//! | [`mark`] | aliases of links |
//! | [`netlink`] | what the kernel answers and tells of links, routes and connections |
//! | [`map_rows`] | rows of the shared maps, records of the event ring buffer |
//! | [`policy_documents`] | network policies, YAML and JSON |
//! | [`xds`] | Envoy's requests on its xDS streams, among changes of what it is to have |
//! | [`access_log`] | messages in which Envoy tells of requests |
//! | [`redirects_file`] | the file that keeps the ports of the proxy |
//! | [`dns`] | queries of containers, and answers of servers |
//! | [`cluster_file`] | the file that lists the nodes of a cluster |
//! | [`feed_messages`] | changes of a producer of the cluster feed |
//! | [`feed_stream`] | the stream of a producer: opening, sequences and changes |
//! | [`feed_state`] | the file that keeps the rows of the cluster feed |
//! | [`pools_file`] | the file that keeps the pools of `--pools-from-cluster` |
//! | [`names_file`] | the file that keeps names and their addresses |
//! | [`ipam_answer`] | what an IPAM plugin answers to ADD |
//! | [`delegate_answer`] | what the service of delegated mode answers |
//! | [`sandbox`] | network configurations, and records of sandboxes |
//!
//! Each module has one `run`, which panics when a property is broken: a parser must not only survive, what it accepts
//! must mean the same when it is written and read again, and what it refuses must be told by name. The programs in
//! `fuzz_targets` hand libFuzzer's inputs to them, the test in `tests/corpus.rs` the checked-in ones.

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

/// A byte slice's lines, `count` of them, and what comes after them; missing lines are empty.
fn head(mut bytes: &[u8], count: usize) -> (Vec<&[u8]>, &[u8]) {
    let mut lines = Vec::with_capacity(count);
    for _ in 0..count {
        let end = bytes.iter().position(|b| *b == b'\n').unwrap_or(bytes.len());
        lines.push(&bytes[..end]);
        bytes = bytes.get(end + 1..).unwrap_or_default();
    }
    (lines, bytes)
}
