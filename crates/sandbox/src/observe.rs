//! Reads the state of sandboxes.

use std::{collections::BTreeMap, path::Path};

use crate::{
    error::{SandboxError, io},
    manage::{Sandboxes, is_this_boot, namespace_of},
    name::SandboxName,
    netns::Namespace,
    process::{self, Running},
    record::{Attachment, Phase, Record},
    view::{Checked, Details, State, Summary},
};

impl Sandboxes {
    /// All sandboxes, by name.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<Summary>, SandboxError> {
        let mut all = Vec::new();
        for name in self.store.names()? {
            match self.store.load(&name) {
                // Removed meanwhile.
                Ok(None) => {}
                Ok(Some(record)) => all.push(self.summary(record)?),
                Err(error) if !matches!(error, SandboxError::Damaged { .. }) => return Err(error),
                Err(error) => all.push(Summary {
                    name,
                    state: State::Damaged,
                    problem: Some(error.to_string()),
                    container_id: None,
                    created_unix_ms: 0,
                    netns: None,
                    labels: BTreeMap::new(),
                    networks: Vec::new(),
                    addresses: Vec::new(),
                    processes: 0,
                }),
            }
        }
        Ok(all)
    }

    fn summary(&self, record: Record) -> Result<Summary, SandboxError> {
        let state = self.state(&record)?;
        let lost = match (state, namespace_of(&record)?) {
            (State::Detached, Some(namespace)) => Some(format!("{} is gone", missing(&record, &namespace)?.join(", "))),
            _ => None,
        };
        let processes = running(&record)?.len();
        // A detached network has released the addresses in its result.
        let attached = record.attachments.iter().filter(|a| a.to_delete > 0);
        let addresses = attached.flat_map(Attachment::addresses).map(str::to_owned).collect();
        Ok(Summary {
            state,
            processes,
            addresses,
            networks: record.attachments.iter().map(|a| a.network.to_string()).collect(),
            name: record.name,
            problem: record.problem.or(lost),
            container_id: Some(record.container_id.into()),
            created_unix_ms: record.created_unix_ms,
            netns: Some(record.netns.path),
            labels: record.labels,
        })
    }

    /// `check` adds the results of CHECK.
    ///
    /// # Errors
    /// The sandbox does not exist, or its record cannot be read.
    pub fn inspect(&self, name: &SandboxName, check: bool) -> Result<Details, SandboxError> {
        let unknown = || SandboxError::Unknown { operation: "inspect", name: name.clone() };
        let record = self.store.load(name)?.ok_or_else(unknown)?;
        let check = if check { Some(self.check(name)?) } else { None };
        Ok(Details { state: self.state(&record)?, running: running(&record)?, record, check })
    }

    fn check(&self, name: &SandboxName) -> Result<Vec<Checked>, SandboxError> {
        let unknown = || SandboxError::Unknown { operation: "check", name: name.clone() };
        let lock = self.known(name)?.ok_or_else(unknown)?;
        let record = self.store.load(name)?.ok_or_else(unknown)?;
        let plugins = self.plugins(&lock);
        let one = |(at, attachment): (usize, &Attachment)| {
            let checked = plugins.check(&record, at);
            Checked {
                network: attachment.network.to_string(),
                ifname: attachment.ifname.to_string(),
                checked: !matches!(checked, Ok(false)),
                problem: checked.err().map(|error| error.to_string()),
            }
        };
        Ok(record.attachments.iter().enumerate().map(one).collect())
    }

    fn state(&self, record: &Record) -> Result<State, SandboxError> {
        let is_locked = matches!(record.phase, Phase::Creating | Phase::Stopping) && self.store.is_locked(&record.name);
        Ok(match (record.phase, is_locked) {
            (Phase::Creating, true) => State::Creating,
            (Phase::Stopping, true) => State::Stopping,
            _ => self.state_held(record)?,
        })
    }

    /// The caller holds the lock.
    pub(crate) fn state_held(&self, record: &Record) -> Result<State, SandboxError> {
        Ok(match record.phase {
            Phase::Creating => State::Interrupted,
            Phase::Ready => match namespace_of(record)? {
                Some(namespace) if missing(record, &namespace)?.is_empty() => State::Ready,
                Some(_) => State::Detached,
                None => State::Gone,
            },
            Phase::Broken => State::Broken,
            Phase::Stopping => State::StopUnfinished,
            Phase::Stopped => State::Stopped,
        })
    }
}

/// Interfaces of results that the namespace lacks.
fn missing<'a>(record: &'a Record, namespace: &Namespace) -> Result<Vec<&'a str>, SandboxError> {
    let made: Vec<&str> = record.attachments.iter().filter_map(Attachment::interface).collect();
    if made.is_empty() {
        return Ok(made);
    }
    let there = namespace.interfaces().map_err(io("list the interfaces of", &record.netns.path))?;
    Ok(made.into_iter().filter(|name| !there.iter().any(|t| t == name)).collect())
}

fn running(record: &Record) -> Result<Vec<Running>, SandboxError> {
    let identity = namespace_of(record)?.map(|n| n.identity);
    let known = if is_this_boot(record)? { record.processes.as_slice() } else { &[] };
    process::running(identity, known).map_err(io("read", Path::new("/proc")))
}
