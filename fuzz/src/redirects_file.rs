//! The file of the proxy's ports (`<state-dir>/redirects.json`).

use wharf_enforce::redirects::Ports;

/// Maximum bytes of a reason.
const MAX_WHY: usize = 2000;

/// Reads the file.
pub fn run(data: &[u8]) {
    match Ports::parse(data) {
        Ok(ports) => {
            let text = ports.to_text().expect("what was read can be written");
            assert_eq!(Ports::parse(&text).expect("the agent's own file"), ports, "ports change on their way");
        }
        Err(why) => {
            let why = why.to_string();
            assert!(!why.is_empty() && why.len() <= MAX_WHY, "{why}");
        }
    }
}
