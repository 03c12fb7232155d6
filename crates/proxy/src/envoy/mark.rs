//! `argv[0]` names Envoy's directory.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
};

use nix::unistd::geteuid;

use super::{Envoy, EnvoyError};
use crate::process::Process;

const PREFIX: &str = "wharf-envoy ";

impl Envoy {
    pub(super) fn mark(&self) -> OsString {
        let directory = std::path::absolute(&self.directory).unwrap_or_else(|_| self.directory.clone());
        let mut mark = OsString::from(PREFIX);
        mark.push(directory);
        mark
    }

    /// In this thread's network and PID namespaces. Other users can imitate the mark: only processes of root, this user
    /// and Envoy's user count.
    pub(super) fn marked(&self) -> Result<Vec<Process>, EnvoyError> {
        let (mark, mut found) = (self.mark(), Vec::new());
        let failed = |source| EnvoyError::File { operation: "list the processes in", path: "/proc".into(), source };
        let namespace_of = |process: &str, kind: &str| {
            fs::metadata(format!("/proc/{process}/ns/{kind}")).map(|file| (file.dev(), file.ino()))
        };
        let own =
            ["net", "pid"].map(|kind| namespace_of("thread-self", kind)).into_iter().collect::<io::Result<Vec<_>>>();
        let own = own.map_err(failed)?;
        let has_mark = |pid: i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).next() == Some(mark.as_bytes())
        };
        let is_here = |pid: i32| {
            let other = ["net", "pid"].map(|kind| namespace_of(&pid.to_string(), kind).ok());
            other.into_iter().eq(own.iter().copied().map(Some))
        };
        let is_of_user = |pid: i32| {
            let Some(user) = self.user else { return true };
            let owner = fs::metadata(format!("/proc/{pid}")).map(|process| process.uid());
            owner.is_ok_and(|uid| [0, geteuid().as_raw(), user.uid].contains(&uid))
        };
        for entry in fs::read_dir("/proc").map_err(failed)? {
            let Some(pid) = entry.map_err(failed)?.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if !has_mark(pid) {
                continue;
            }
            let failed = |source: io::Error| EnvoyError::Process { operation: "look at", pid, source };
            // Again: the number can be reused.
            if let Some(process) = Process::find(pid).map_err(failed)?
                && has_mark(pid)
                && is_here(pid)
                && is_of_user(pid)
                && !process.has_ended()
            {
                found.push(process);
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::CommandExt as _, process::Command};

    use super::*;

    #[tokio::test]
    async fn a_process_is_found_by_the_mark_of_its_directory() {
        let [own, other] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let envoy = |directory: &tempfile::TempDir| Envoy {
            program: "sleep".into(),
            directory: directory.path().to_owned(),
            user: None,
            threads: 1,
            ends_with_agent: false,
        };
        let (own, other) = (envoy(&own), envoy(&other));
        let started = Command::new("sleep").arg0(own.mark()).arg("60").spawn();
        let mut child = started.expect("sleep");
        // `execve` ends the spawn before the kernel sets the arguments.
        let arguments = format!("/proc/{}/cmdline", child.id());
        while std::fs::read(&arguments).expect("a process").is_empty() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        let pids =
            |envoy: &Envoy| envoy.marked().expect("listed").iter().map(|process| process.id.pid).collect::<Vec<_>>();
        assert_eq!(pids(&own), [i32::try_from(child.id()).expect("a pid")]);
        assert_eq!(pids(&other), [0; 0], "another directory");
        let inherited = |supervised| {
            let (proxy, _records) = crate::Proxy::new(1);
            own.remember(&proxy, supervised).expect("read");
            proxy.inherited()
        };
        assert_eq!(inherited(true), i32::try_from(child.id()).ok());
        assert_eq!(inherited(false), None, "an agent that starts no Envoy ignores the mark");
        own.stop().await.expect("it ends");
        child.wait().expect("reaped");
        assert_eq!(pids(&own), [0; 0]);
    }
}
