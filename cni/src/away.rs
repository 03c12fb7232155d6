//! DEL without the agent: writes a deletion record, then removes the container's link. The agent finishes a recorded
//! delete.

use std::{
    fs, io,
    time::{SystemTime, UNIX_EPOCH},
};

use wharf_api::client::ClientError;
use wharf_handover::queue::{Deletion, EndpointRef, Queue, VERSION};

use crate::{
    commands::Done,
    fault::{Code, Fault},
    link::{self, Marked, Removal},
    log::Level,
    netconf::NetConf,
    request::Target,
};

/// random(4).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

pub(crate) async fn delete(subject: &str, conf: &NetConf, target: &Target, why: &ClientError) -> Result<Done, Fault> {
    let say = |level, text: String| conf.log.say(level, format_args!("{subject}: {text}"));
    say(Level::Info, format!("{why}; going on without the agent"));
    let queue = Queue::of_socket(&conf.socket);
    let links = link::find(conf, target).await;
    if links.as_ref().is_ok_and(Vec::is_empty) && is_missing(&queue) {
        say(Level::Info, "no agent has run in this boot, so there is nothing to delete".into());
        return Ok(Done::default());
    }
    // The record suffices.
    let links = links.unwrap_or_else(|why| {
        say(Level::Warn, format!("{why}; the agent will remove the link"));
        Vec::new()
    });
    wharf_crash::point("shim/del/before-record");
    let record = put(&queue, conf, target, &links).map_err(|(problem, hint)| {
        Fault::new(Code::TryAgain, format!("{subject}: the agent does not answer ({why}), and {problem}"))
            .with_details(hint)
    })?;
    wharf_crash::point("shim/del/after-record");
    for link in &links {
        match link::remove(link, conf, target).await {
            Ok(Removal::Removed) => say(Level::Info, format!("link {link} is removed")),
            Ok(Removal::Gone) => say(Level::Info, format!("link {link} was gone")),
            Err(problem) => say(Level::Warn, format!("{problem}; the agent will remove it")),
        }
        wharf_crash::point("shim/del/after-link-removed");
    }
    say(Level::Info, format!("the agent will finish it: {}", queue.path().join(record).display()));
    Ok(Done { deferred: true, ..Done::default() })
}

pub(crate) fn is_delegated(conf: &NetConf) -> bool {
    Queue::unfinished(Queue::of_socket(&conf.socket).run_dir()).path().exists()
}

/// Whether a delegated service has not accepted a DEL and may still use the addresses. Only delegated mode has a
/// directory of unfinished ADDs.
pub(crate) fn is_owed(conf: &NetConf, target: &Target) -> bool {
    let deletions = Queue::of_socket(&conf.socket);
    let unfinished = Queue::unfinished(deletions.run_dir());
    unfinished.path().exists()
        && [deletions, unfinished].iter().any(|queue| queue.contains(&conf.name, &target.container_id, &target.ifname))
}

/// The agent creates the run directory at its first start in a boot.
fn is_missing(queue: &Queue) -> bool {
    fs::symlink_metadata(queue.run_dir()).is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
}

fn put(queue: &Queue, conf: &NetConf, target: &Target, links: &[Marked]) -> Result<String, (String, String)> {
    let boot_id = fs::read_to_string(BOOT_ID)
        .map_err(|e| (format!("read {BOOT_ID}: {e}"), "mount /proc where the runtime runs its plugins".to_owned()))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let deletion = Deletion {
        version: VERSION,
        network: conf.name.clone(),
        container_id: target.container_id.clone(),
        ifname: target.ifname.clone(),
        endpoint: endpoint(links),
        boot_id: boot_id.trim().to_owned(),
        written_unix_ms: u64::try_from(now).unwrap_or(u64::MAX),
        canary: None,
    };
    queue.put(&deletion).map_err(|e| (e.problem(), e.hint().to_owned()))
}

/// `None` for several links: the agent deletes any endpoint of the attachment.
fn endpoint(links: &[Marked]) -> Option<EndpointRef> {
    match links {
        [link] => Some(EndpointRef { id: link.mark.id, epoch: link.mark.epoch }),
        _ => None,
    }
}
