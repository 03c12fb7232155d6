//! Starts a stopped sandbox in a new namespace.

use std::time::Duration;

use crate::{
    error::SandboxError,
    manage::{Sandboxes, this_boot},
    name::SandboxName,
    netns::Namespace,
    network::Plugins,
    record::{Phase, Record},
    store::Lock,
    view::{Details, State},
};

impl Sandboxes {
    /// `None` if the sandbox is ready. A failed start leaves it stopped.
    ///
    /// # Errors
    /// The sandbox does not exist, is neither ready nor stopped, or a plugin or system call fails.
    pub fn start(&self, name: &SandboxName) -> Result<Option<Details>, SandboxError> {
        let unknown = || SandboxError::Unknown { operation: "start", name: name.clone() };
        let lock = self.known(name)?.ok_or_else(unknown)?;
        let mut record = self.store.load(name)?.ok_or_else(unknown)?;
        match self.state_held(&record)? {
            State::Ready => return Ok(None),
            State::Stopped => {}
            // After a reboot, the networks still need their DEL.
            State::Gone => {
                self.stop_held(&mut record, &lock, Duration::ZERO)?;
            }
            state => return Err(SandboxError::NotReady { operation: "start", name: name.clone(), state }),
        }
        Plugins::installed(&self.dirs.plugins, &record.attachments)?;
        let path = self.free_path(name)?;
        let namespace = Namespace::create()?;
        (record.netns.path, record.netns.identity, record.boot_id) = (path, namespace.identity, this_boot()?);
        (record.phase, record.problem) = (Phase::Creating, None);
        record.processes.clear();
        record.attachments.iter_mut().for_each(|attachment| attachment.result = None);
        self.store.save(&record)?;
        wharf_crash::point("sandbox-start/after-record");
        match self.attach(&mut record, namespace, &lock) {
            Ok(()) => Ok(Some(Details { state: State::Ready, record, running: Vec::new(), check: None })),
            Err(cause) => Err(self.stop_again(record, &lock, cause)),
        }
    }

    fn stop_again(&self, mut record: Record, lock: &Lock, cause: SandboxError) -> SandboxError {
        let undone = match &cause {
            // The object at the path is another program's.
            SandboxError::NamespaceTaken { .. } => Ok(()),
            _ => self.tear_down(&mut record, lock, Duration::ZERO).map(drop),
        };
        record.problem = Some(cause.to_string());
        record.phase = if undone.is_ok() { Phase::Stopped } else { Phase::Stopping };
        // The stored record says `creating`; the next stop removes the rest.
        let _ = self.store.save(&record);
        match undone {
            Ok(()) => cause,
            Err(undo) => {
                SandboxError::Undo { name: record.name, verb: "stop", cause: Box::new(cause), undo: Box::new(undo) }
            }
        }
    }
}
