//! The file that keeps the ports of the proxy (`<state-dir>/redirects.json`).

use std::fs;

use wharf_agent::policy::redirects::{load, save};

/// Longest reason, bytes.
const MAX_WHY: usize = 2000;

/// Runs one input: the file.
pub fn run(data: &[u8]) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let path = directory.path().join("redirects.json");
    fs::write(&path, data).expect("write the file");
    match load(&path) {
        Ok(ports) => {
            // What was read can be kept, and is the same then.
            let other = directory.path().join("other.json");
            save(&other, &ports).expect("what was read can be written");
            assert_eq!(load(&other).expect("the agent's own file"), ports, "ports change on their way");
        }
        Err(why) => {
            let why = why.to_string();
            assert!(!why.is_empty() && why.len() <= MAX_WHY, "{why}");
        }
    }
    assert_eq!(fs::read(&path).expect("the file"), data, "a file was changed by reading it");
}
