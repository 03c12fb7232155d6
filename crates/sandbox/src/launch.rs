//! Starts commands in sandboxes.

use std::path::Path;

use crate::{
    command::{self, Launch, Started, resolv_conf},
    error::{SandboxError, io},
    manage::{Sandboxes, namespace_of},
    name::SandboxName,
    process,
    record::{Process, Record},
    view::State,
};

impl Sandboxes {
    /// Starts a command.
    ///
    /// # Errors
    /// The sandbox does not exist or is not ready, or the command cannot be started.
    pub fn launch(&self, name: &SandboxName, launch: &Launch) -> Result<Started, SandboxError> {
        let unknown = || SandboxError::Unknown { operation: "run in", name: name.clone() };
        let _lock = self.known(name)?.ok_or_else(unknown)?;
        let mut record = self.store.load(name)?.ok_or_else(unknown)?;
        let state = self.state_held(&record)?;
        let namespace = namespace_of(&record)?.filter(|_| state == State::Ready);
        let namespace =
            namespace.ok_or_else(|| SandboxError::NotReady { operation: "run in", name: name.clone(), state })?;
        let dns = record.attachments.iter().find_map(|a| resolv_conf(a.result.as_ref()?));
        let started = command::start(name, &namespace.file, dns.as_deref(), launch)?;
        // If this process dies here, a stop finds the command by its namespace. The record covers processes that leave
        // it.
        if let Err(error) = self.note(&mut record, started.pid()) {
            started.end();
            return Err(error);
        }
        Ok(started)
    }

    /// Records a process, and removes ended ones from the record.
    fn note(&self, record: &mut Record, pid: u32) -> Result<(), SandboxError> {
        let start = |pid| process::started(pid).map_err(io("read the start of a process in", Path::new("/proc")));
        record.processes.retain(|p| start(p.pid).is_ok_and(|started| started == Some(p.started)));
        let pid = i32::try_from(pid).unwrap_or_default();
        record.processes.extend(start(pid)?.map(|started| Process { pid, started }));
        self.store.save(record)
    }
}
