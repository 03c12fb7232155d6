//! The file that keeps the rows of the cluster feed (`<state-dir>/feed.json`).

use wharf_agent::cluster::feed::kept::rewrite;

/// Boot of the start that reads the file.
const BOOT: &str = "boot";

/// Reads the file as a start does; what is written afterwards is read again as it is.
///
/// # Panics
/// When it is not, or when a refusal has no cause.
pub fn run(bytes: &[u8]) {
    match rewrite(bytes, "a", BOOT) {
        Ok((written, _)) => {
            let (again, is_whole) = rewrite(&written, "a", BOOT).expect("what was written");
            assert!(is_whole && again == written, "{}", String::from_utf8_lossy(&written));
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}
