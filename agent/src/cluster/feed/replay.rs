//! A stream without connection and waits, for the fuzz target.

use std::{path::Path, sync::Arc};

use tonic::Status;
use wharf_feed::v1;

use super::{
    ClusterFeed, MAX_LISTED, Step, Work, refused_row, rows,
    session::{Content, content_of, opening_of, read},
};

/// Answers to a stream's messages.
#[derive(Debug)]
pub struct Replayed {
    /// One per message with changes.
    pub processed: Vec<v1::Processed>,
    /// Refused rows after the last message.
    pub refused: v1::RefusedRows,
    /// Why the stream ended early.
    pub ended: Option<String>,
}

/// Handles the messages of a new producer as a session does, in a feed without rows. The stream ends where a session
/// waits. `own`: name of this node.
#[must_use]
pub fn replay(own: &str, messages: impl IntoIterator<Item = v1::ProducerMessage>) -> Replayed {
    let nowhere = Path::new("");
    let feed = Arc::new(ClusterFeed::new(own, nowhere, None, nowhere));
    let mut processed = Vec::new();
    let ended = run(&feed, messages, &mut processed).err();
    let (refused, all) = feed.refused(MAX_LISTED);
    let unlisted = u64::try_from(all.saturating_sub(refused.len())).unwrap_or(u64::MAX);
    let refused = v1::RefusedRows { rows: refused.into_iter().map(refused_row).collect(), unlisted };
    Replayed { processed, refused, ended }
}

fn run(
    feed: &Arc<ClusterFeed>,
    messages: impl IntoIterator<Item = v1::ProducerMessage>,
    answers: &mut Vec<v1::Processed>,
) -> Result<(), String> {
    let cause = |status: Status| status.message().to_owned();
    let mut messages = messages.into_iter();
    let Some(v1::ProducerMessage { mut sequence, body }) = messages.next() else { return Ok(()) };
    let opening = read(opening_of(body).map_err(cause)?, &feed.own)?;
    let open = feed.open(&opening).map_err(|why| format!("{why:?}"))?;
    for message in messages {
        let next = message.sequence;
        let content = content_of(message, sequence).map_err(cause)?;
        sequence = next;
        let changes = match content {
            Content::Changes(changes) => changes,
            Content::Watches(watches) => {
                feed.set_watches(open.stream, watches);
                continue;
            }
        };
        let mut work = Work::new(sequence, rows::read(changes)?);
        let processed = loop {
            match feed.apply(open.stream, &mut work).map_err(cause)? {
                Step::More => {}
                Step::Wait(_) => return Err("a snapshot begins too early".to_owned()),
                Step::Done(processed) => break processed,
            }
        };
        answers.push(processed);
    }
    Ok(())
}
