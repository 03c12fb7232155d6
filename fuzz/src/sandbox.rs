//! Network configurations and records of sandboxes; the first byte selects.

use wharf_sandbox::{plugin_types, record::Record};

/// Reads a configuration or record.
pub fn run(bytes: &[u8]) {
    let Some((kind, text)) = bytes.split_first() else { return };
    match kind {
        b'r' => match Record::parse(text) {
            Ok(record) => {
                let again = serde_json::to_vec(&record).expect("a record is JSON");
                assert_eq!(Record::parse(&again).as_ref(), Ok(&record), "not read back");
            }
            Err(why) => assert!(!why.is_empty()),
        },
        _ => match plugin_types(text, *kind == b'l') {
            Ok(types) => {
                assert!(!types.is_empty());
                for name in types {
                    assert!(!["", ".", ".."].contains(&name.as_str()) && !name.contains(['/', '\0']), "{name:?}");
                }
            }
            Err(why) => assert!(!why.is_empty()),
        },
    }
}
