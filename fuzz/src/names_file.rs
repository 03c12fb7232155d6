//! The file of names and their addresses.

use wharf_dns::cache::{Cache, MAX_ADDRESSES};

/// Reads the file.
pub fn run(bytes: &[u8]) {
    const NOW: u64 = 1_700_000_000_000;
    let Ok(value) = serde_json::from_slice(bytes) else { return };
    match Cache::from_json(value, NOW) {
        Ok(cache) => {
            let again = cache.to_json().expect("names and addresses are texts");
            assert_eq!(Cache::from_json(again, NOW).expect("what was written"), cache);
            assert!(cache.len() <= MAX_ADDRESSES);
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}
