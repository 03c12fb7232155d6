//! The file of the cluster feed's rows (`<state-dir>/feed.json`).

use wharf_agent::cluster::feed::kept::rewrite;

const BOOT: &str = "boot";

/// Reads the file as a start does.
pub fn run(bytes: &[u8]) {
    match rewrite(bytes, "a", BOOT) {
        Ok((written, _)) => {
            let (again, is_whole) = rewrite(&written, "a", BOOT).expect("what was written");
            assert!(is_whole && again == written, "{}", String::from_utf8_lossy(&written));
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}
