//! The calling container runtime.

use std::{fs::File, io::Read as _, os::unix::process::parent_id};

use wharf_names::rules::{MAX_PROGRAM_BYTES, is_program_byte};

/// Parent's `/proc/PID/comm` (proc_pid_comm(5)).
pub(crate) fn of_process() -> Option<String> {
    let parent = parent_id();
    // 0: another PID namespace. 1: the runtime has ended.
    if parent <= 1 {
        return None;
    }
    let longest = u64::try_from(MAX_PROGRAM_BYTES.saturating_add(1)).ok()?;
    let mut comm = Vec::new();
    File::open(format!("/proc/{parent}/comm")).ok()?.take(longest).read_to_end(&mut comm).ok()?;
    name(&comm)
}

/// Replaces bytes that the agent rejects.
fn name(comm: &[u8]) -> Option<String> {
    let comm = comm.strip_suffix(b"\n").unwrap_or(comm);
    let name: String = comm
        .iter()
        .take(MAX_PROGRAM_BYTES)
        .map(|&byte| if is_program_byte(byte) { char::from(byte) } else { '_' })
        .collect();
    (!name.is_empty()).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_made_one_that_the_agent_takes() {
        for (comm, expected) in [
            (&b"containerd\n"[..], Some("containerd")),
            (b"k3s-server\n", Some("k3s-server")),
            (b"tmux: server\n", Some("tmux__server")),
            (b"\xff\x1b[31m\n\n", Some("___31m_")),
            (b"sixteen-bytes-xx", Some("sixteen-bytes-x")),
            (b"\n", None),
            (b"", None),
        ] {
            let made = name(comm);
            assert_eq!(made.as_deref(), expected);
            assert!(made.is_none_or(|made| wharf_names::ids::RuntimeName::parse(&made).is_ok()));
        }
    }

    #[test]
    fn the_program_that_runs_this_test_has_a_name() {
        assert!(of_process().is_some());
    }
}
