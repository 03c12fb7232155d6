//! Envoy's messages about requests, with texts that clients choose, and about its counters.

use wharf_proxy::{
    Content,
    outside::{access_log, counter},
};

/// Maximum bytes of a kept text.
const MAX_TEXT: usize = 2048;

/// Reads one message.
pub fn run(data: &[u8]) {
    assert!(counter(data).is_none_or(|value| value < 1 << 53), "a count is not exact");
    let Some(records) = access_log(data) else { return };
    // Minimum size of an entry with a member.
    assert!(records.len() <= data.len() / 16, "{} records in {} bytes", records.len(), data.len());
    for record in &records {
        let texts = match &record.content {
            Content::Http { method, path, host, .. } => vec![method, path, host],
            Content::Tls { server_name } => vec![server_name],
        };
        assert!(texts.iter().all(|text| text.len() <= MAX_TEXT), "a text was not cut");
        assert!(record.flags.is_ascii() && record.flags.len() < 64, "{}", record.flags);
    }
    assert_eq!(access_log(data).as_ref(), Some(&records), "a message has two meanings");
    // Concatenation concatenates the repeated field of entries.
    let twice = access_log(&[data, data].concat()).expect("two messages are one");
    assert!(twice.len() >= records.len(), "records are lost");
}
