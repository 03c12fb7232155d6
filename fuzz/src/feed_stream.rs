//! The stream of a producer of the cluster feed: opening, sequences and changes.

use prost::Message as _;
use wharf_agent::cluster::feed::replay::{Replayed, replay};
use wharf_feed::v1;

/// Maximum bytes of a refusal's cause.
const MAX_CAUSE: usize = 2_048;
/// Maximum refused rows of an answer.
const MAX_LISTED: usize = 1_024;

/// Handles messages, each after its length, as one stream.
pub fn run(mut bytes: &[u8]) {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let Ok(message) = v1::ProducerMessage::decode_length_delimited(&mut bytes) else { break };
        messages.push(message);
    }
    let sent: Vec<u64> = messages.iter().skip(1).map(|message| message.sequence).collect();
    let Replayed { processed, refused, ended } = replay("a", messages);
    let answered: Vec<u64> = processed.iter().map(|answer| answer.sequence).collect();
    assert!(sent.starts_with(&answered) && answered.is_sorted(), "{sent:?} are answered by {answered:?}");
    match ended {
        Some(why) => assert!(!why.is_empty() && !why.chars().any(char::is_control), "{why:?}"),
        None => assert_eq!(answered, sent),
    }
    for answer in processed {
        assert!(answer.unlisted == 0 || answer.refused.len() == MAX_LISTED, "{} are not listed", answer.unlisted);
        answer.refused.iter().for_each(sound);
    }
    refused.rows.iter().for_each(sound);
}

fn sound(row: &v1::RefusedRow) {
    assert!(!row.kind.is_empty() && !row.reason.is_empty() && row.reason.len() <= MAX_CAUSE, "{row:?}");
    assert!(!row.name.chars().chain(row.reason.chars()).any(char::is_control), "{row:?}");
}
