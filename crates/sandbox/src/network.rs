//! ADD, DEL and CHECK of attachments (CNI specification, section 3).

use std::{
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    error::SandboxError,
    manage::Progress,
    plugin::{self, Call, LIMIT, PluginError, Verb},
    record::{Attachment, Record},
    store::{Lock, Store},
};

pub(crate) struct Plugins<'a> {
    pub(crate) store: &'a Store,
    pub(crate) path: &'a [PathBuf],
    pub(crate) lock: &'a Lock,
    pub(crate) tell: &'a dyn Fn(Progress<'_>),
    pub(crate) no_wait: bool,
}

impl Plugins<'_> {
    /// Records each ADD before its plugin runs.
    pub(crate) fn add(&self, record: &mut Record) -> Result<(), SandboxError> {
        for at in 0..record.attachments.len() {
            let mut previous: Option<Value> = None;
            for plugin in 0..record.attachments.get(at).map_or(0, |a| a.plugins.len()) {
                if let Some(attachment) = record.attachments.get_mut(at) {
                    attachment.to_delete = plugin + 1;
                }
                self.store.save(record)?;
                wharf_crash::point("sandbox-create/before-add");
                let netns = record.netns.path.clone();
                previous = self.call(Verb::Add, record, at, plugin, &netns, previous.as_ref())?;
                wharf_crash::point("sandbox-create/after-add");
            }
            if let Some(attachment) = record.attachments.get_mut(at) {
                attachment.result = previous;
            }
        }
        Ok(())
    }

    /// A missing plugin could neither attach nor roll back.
    pub(crate) fn installed(path: &[PathBuf], attachments: &[Attachment]) -> Result<(), SandboxError> {
        for attachment in attachments {
            for conf in &attachment.plugins {
                let plugin = conf.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
                if let Err(cause) = plugin::find(path, &plugin) {
                    let (network, ifname) = (attachment.network.to_string(), attachment.ifname.to_string());
                    return Err(Box::new(PluginError { verb: Verb::Add, plugin, network, ifname, cause }).into());
                }
            }
        }
        Ok(())
    }

    /// Last network first. A failed plugin stops its chain, because earlier plugins may need resources that it holds;
    /// other networks continue. Successful DELs are not repeated.
    pub(crate) fn del(&self, record: &mut Record, netns: &Path) -> Result<(), SandboxError> {
        let mut failures = Vec::new();
        for at in (0..record.attachments.len()).rev() {
            while let Some(left) = record.attachments.get(at).map(|a| a.to_delete).filter(|left| *left > 0) {
                let result = record.attachments.get(at).and_then(|a| a.result.clone());
                wharf_crash::point("sandbox-stop/before-del");
                if let Err(error) = self.call(Verb::Del, record, at, left - 1, netns, result.as_ref()) {
                    failures.push(SandboxError::Plugin(error));
                    break;
                }
                wharf_crash::point("sandbox-stop/after-del");
                if let Some(attachment) = record.attachments.get_mut(at) {
                    attachment.to_delete = left - 1;
                }
                self.store.save(record)?;
            }
        }
        SandboxError::all(failures)
    }

    /// False if the network forbids CHECK.
    pub(crate) fn check(&self, record: &Record, at: usize) -> Result<bool, Box<PluginError>> {
        let Some(attachment) = record.attachments.get(at).filter(|a| a.check) else { return Ok(false) };
        for plugin in 0..attachment.plugins.len() {
            self.call(Verb::Check, record, at, plugin, &record.netns.path, attachment.result.as_ref())?;
        }
        Ok(true)
    }

    fn call(
        &self,
        verb: Verb,
        record: &Record,
        at: usize,
        plugin: usize,
        netns: &Path,
        previous: Option<&Value>,
    ) -> Result<Option<Value>, Box<PluginError>> {
        let Some((attachment, conf)) = record.attachments.get(at).and_then(|a| Some((a, a.plugins.get(plugin)?)))
        else {
            return Ok(None);
        };
        let kind = conf.get("type").and_then(Value::as_str).unwrap_or_default();
        (self.tell)(Progress::Step(&format!(
            "{} of plugin {kind} for {} of sandbox {}",
            verb.as_str(),
            attachment.ifname,
            record.name
        )));
        let conf = with_previous(conf, verb, attachment, previous);
        let no_wait = if self.no_wait && verb == Verb::Add { ";NoWait=1" } else { "" };
        Call {
            verb,
            container_id: record.container_id.as_str(),
            netns,
            ifname: attachment.ifname.as_str(),
            cni_args: &format!("{}{no_wait}", attachment.cni_args),
            path: self.path,
            conf: &conf,
            lock: self.lock.file.as_fd(),
            limit: LIMIT,
        }
        .run(&|line| (self.tell)(Progress::Said(line)))
    }
}

/// ADD gets the previous plugin's result; since 0.4.0, other verbs get the chain's.
fn with_previous(conf: &Value, verb: Verb, attachment: &Attachment, previous: Option<&Value>) -> Value {
    let mut conf = conf.clone();
    let wanted = verb == Verb::Add || attachment.cni_version() >= "0.4.0";
    if let (Some(object), Some(previous), true) = (conf.as_object_mut(), previous, wanted) {
        object.insert("prevResult".to_owned(), previous.clone());
    }
    conf
}
