//! Forwarding of the node: packets of containers to other networks, and their answers, need it.
//!
//! Settings (`/proc/sys/net`) that are changed are noted first, with the values to go back to, in a file that dies with the
//! boot as they do. What is as wanted already is somebody else's and not noted, so it is never taken back.
//!
//! A node that forwards IPv6 no longer listens to router advertisements, from which it may have its own default route,
//! unless an interface's `accept_ra` is 2 (Documentation/networking/ip-sysctl.rst). Interfaces that listened go on.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};
use wharf_core::{
    finding::NodeProblem,
    kernel::{KernelErrorKind, Result},
};
use wharf_crash as crash;

use crate::error::{fail, wrap};

/// How the names of the record in the run directory begin.
pub const RECORD_STEM: &str = "settings.";
/// Name of the record.
const RECORD: &str = "settings.json";

const OPERATION: &str = "set up forwarding";
const ROOT: &str = "/proc/sys/net";
const FORWARD4: &str = "ipv4/ip_forward";
const FORWARD6: &str = "ipv6/conf/all/forwarding";
/// The kernel sets it with [`FORWARD4`], to its opposite: a node that ceases to forward would accept redirects.
const REDIRECTS: &str = "ipv4/conf/all/accept_redirects";
/// Bytes of the largest record that is read.
const MAX_RECORD: u64 = 1 << 20;

/// Settings by their path below `/proc/sys/net`, with the values to go back to.
type Before = BTreeMap<String, String>;

/// What is in the file. A boot sets every setting anew, so a record of another boot says nothing.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    boot_id: String,
    before: Before,
}

/// Which families are to be forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Families {
    pub(crate) ipv4: bool,
    pub(crate) ipv6: bool,
}

/// The settings, and the record of those that were changed.
pub(crate) struct Forwarding {
    record: PathBuf,
    /// The record's content, once read or written: the file may be removed under a running agent, and is written anew.
    known: Mutex<Option<Before>>,
}

impl Forwarding {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self { record: run_dir.join(RECORD), known: Mutex::default() }
    }

    /// Makes the node forward.
    pub(crate) fn ensure(&self, families: Families) -> Result<()> {
        let mut before = self.changed()?;
        let wanted = wanted(families, &before)?;
        if wanted.is_empty() && (before.is_empty() || self.record.exists()) {
            return Ok(());
        }
        for (path, _) in &wanted {
            // The kernel gives each interface the value of the whole, also when it goes back.
            for (path, value) in per_interface(path)?.into_iter().chain([(path.clone(), read(path)?)]) {
                before.entry(path).or_insert(value);
            }
        }
        self.write(before)?;
        crash::point("datapath/forwarding/after-record");
        for (path, value) in wanted {
            set(&path, value)?;
            crash::point("datapath/forwarding/after-setting");
        }
        Ok(())
    }

    /// Settings that are not as wanted, and whether [`Self::ensure`] is called for them.
    pub(crate) fn observe(&self, families: Families, repairable: bool) -> Result<Vec<NodeProblem>> {
        let wanted = wanted(families, &self.changed()?)?;
        let problem = |(path, expected): (String, &str)| {
            Ok(NodeProblem::Setting {
                found: read(&path)?,
                name: dotted(&path),
                expected: expected.to_owned(),
                repairable,
            })
        };
        wanted.into_iter().map(problem).collect()
    }

    /// The settings that were changed since the node booted, by path, with the values to go back to. Nothing where there
    /// is no record.
    pub(crate) fn changed(&self) -> Result<Before> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_none() {
            *known = Some(self.read()?);
        }
        Ok(known.clone().unwrap_or_default())
    }

    fn read(&self) -> Result<Before> {
        let failed = |e: &(dyn std::error::Error + 'static)| wrap(OPERATION, self.record.display().to_string(), e);
        let damaged = match fs::symlink_metadata(&self.record) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Before::new()),
            Err(e) => return Err(failed(&e)),
            Ok(meta) if !meta.is_file() || meta.len() > MAX_RECORD => "it is no file of a record's size".to_owned(),
            Ok(_) => match serde_json::from_slice::<Record>(&fs::read(&self.record).map_err(|e| failed(&e))?) {
                Ok(record) => {
                    let of_this_boot = record.boot_id == boot_id()?;
                    return Ok(record.before.into_iter().filter(|(path, _)| of_this_boot && is_ours(path)).collect());
                }
                Err(why) => why.to_string(),
            },
        };
        let bad = self.record.with_extension("bad");
        fs::rename(&self.record, &bad).map_err(|e| failed(&e))?;
        tracing::warn!(
            "{} was damaged ({damaged}) and is {} now; the settings that it noted are not taken back",
            self.record.display(),
            bad.display()
        );
        Ok(Before::new())
    }

    /// Takes back what was changed, where nobody changed it since, and forgets it.
    pub(crate) fn take_back(&self) -> Result<()> {
        let before = self.changed()?;
        // What somebody else changed since stays. The kernel overwrites each interface's value with the whole's.
        let is_as_left = |path: &str| match path.rsplit('/').next() {
            Some("accept_ra") => read(path).is_ok_and(|now| now == "2"),
            Some("accept_redirects") => true,
            _ => read(path).is_ok_and(|now| now == "1"),
        };
        let ours = before.iter().filter(|(path, _)| is_as_left(path));
        let (whole, single): (Vec<_>, Vec<_>) =
            ours.partition(|(path, _)| [FORWARD4, FORWARD6].contains(&path.as_str()));
        for (path, value) in whole.into_iter().chain(single) {
            set(path, value)?;
        }
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(Before::new());
        match fs::remove_file(&self.record) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(wrap(OPERATION, self.record.display().to_string(), &e))
            }
            _ => Ok(()),
        }
    }

    fn write(&self, before: Before) -> Result<()> {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Some(before.clone());
        let failed = |e: &(dyn std::error::Error + 'static)| wrap(OPERATION, self.record.display().to_string(), e);
        let text = serde_json::to_string_pretty(&Record { boot_id: boot_id()?, before }).map_err(|e| failed(&e))?;
        let next = self.record.with_extension("next");
        fs::write(&next, text).and_then(|()| fs::rename(&next, &self.record)).map_err(|e| failed(&e))
    }
}

/// Whether a path may be in the record: a record that somebody else wrote must not lead elsewhere.
fn is_ours(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    match parts.as_slice() {
        ["ipv4", "ip_forward"] | ["ipv4", "conf", "all", "accept_redirects"] => true,
        ["ipv4" | "ipv6", "conf", name, "forwarding"] | ["ipv6", "conf", name, "accept_ra"] => {
            ![".", ".."].contains(name)
        }
        _ => false,
    }
}

/// The settings that are to change, in the order in which to change them.
fn wanted(families: Families, changed: &Before) -> Result<Vec<(String, &'static str)>> {
    let mut wanted = Vec::new();
    if families.ipv4 && read(FORWARD4)? != "1" {
        wanted.push((FORWARD4.to_owned(), "1"));
    }
    let forwards = !families.ipv6 || read(FORWARD6)? == "1";
    // Where somebody else turned it on, what interfaces listen to is their choice.
    if families.ipv6 && (!forwards || changed.contains_key(FORWARD6)) {
        for name in interfaces("ipv6")? {
            let path = format!("ipv6/conf/{name}/accept_ra");
            // An interface that goes away is none of ours any more.
            if read(&path).is_ok_and(|value| value == "1") {
                wanted.push((path, "2"));
            }
        }
    }
    if !forwards {
        wanted.push((FORWARD6.to_owned(), "1"));
    }
    Ok(wanted)
}

/// Interfaces that are not Wharf's own.
fn interfaces(family: &str) -> Result<Vec<String>> {
    let path = format!("{ROOT}/{family}/conf");
    let failed = |e: io::Error| wrap(OPERATION, path.as_str(), &e);
    let mut names = Vec::new();
    for entry in fs::read_dir(&path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        let own = wharf_core::endpoint::parse_host_ifname(&name).is_some() || name.starts_with(crate::ROUTER_IFNAME);
        if !own && name != "all" && name != "lo" {
            names.push(name);
        }
    }
    Ok(names)
}

/// What the kernel overwrites with a setting of the whole node: interfaces that forward already, which go on when the node
/// no longer does, and whether the node accepts redirects.
fn per_interface(path: &str) -> Result<Vec<(String, String)>> {
    let family = match path {
        FORWARD4 => "ipv4",
        FORWARD6 => "ipv6",
        _ => return Ok(Vec::new()),
    };
    let redirects = if family == "ipv4" { Some((REDIRECTS.to_owned(), read(REDIRECTS)?)) } else { None };
    let paths = interfaces(family)?.into_iter().map(|name| format!("{family}/conf/{name}/forwarding"));
    let forwarding = paths.filter(|path| read(path).is_ok_and(|value| value == "1")).map(|path| (path, "1".to_owned()));
    Ok(forwarding.chain(redirects).collect())
}

/// Identifies this boot (random(4), /proc/sys/kernel/random/boot_id).
fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(fs::read_to_string(path).map_err(|e| wrap("read boot id", path, &e))?.trim().to_owned())
}

/// The name that `sysctl` has for it.
pub(crate) fn dotted(path: &str) -> String {
    format!("net.{}", path.replace('.', "\0").replace('/', ".").replace('\0', "/"))
}

fn read(path: &str) -> Result<String> {
    let text = fs::read_to_string(Path::new(ROOT).join(path)).map_err(|e| wrap("read setting", dotted(path), &e))?;
    Ok(text.trim().to_owned())
}

pub(crate) fn set(path: &str, value: &str) -> Result<()> {
    fs::write(Path::new(ROOT).join(path), value).map_err(|e| {
        let cause =
            format!("{e}; set it yourself (`sysctl -w {}={value}`), or start with --masquerade off", dotted(path));
        fail(OPERATION, dotted(path), KernelErrorKind::Permission, cause)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_leads_to_forwarding_and_nowhere_else() {
        for yes in
            ["ipv4/ip_forward", "ipv6/conf/all/forwarding", "ipv6/conf/eth0.7/accept_ra", "ipv4/conf/br0/forwarding"]
        {
            assert!(is_ours(yes), "{yes}");
        }
        for no in ["ipv4/tcp_syncookies", "ipv6/conf/../accept_ra", "../kernel/panic", "ipv6/conf/a/b/accept_ra", ""] {
            assert!(!is_ours(no), "{no}");
        }
    }

    #[test]
    fn a_setting_has_the_name_that_sysctl_takes() {
        assert_eq!(dotted("ipv6/conf/eth0.7/accept_ra"), "net.ipv6.conf.eth0/7.accept_ra");
    }
}
