//! Settings (`/proc/sys/net`) that Wharf changes, and the record of their previous values, which is written before the
//! change. A setting that already has the wanted value is not recorded, so it is never restored.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};
use wharf_core::kernel::{KernelErrorKind, Result};
use wharf_crash as crash;

use crate::error::{fail, wrap};

/// File name prefix of the records.
pub const RECORD_STEM: &str = "settings.";

const OPERATION: &str = "change settings";
pub(crate) const ROOT: &str = "/proc/sys/net";
pub(crate) const FORWARD4: &str = "ipv4/ip_forward";
pub(crate) const FORWARD6: &str = "ipv6/conf/all/forwarding";
/// Bytes.
const MAX_RECORD: u64 = 1 << 20;

/// By path below [`ROOT`].
pub(crate) type Before = BTreeMap<String, String>;

/// Void after a boot, which resets every setting.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    boot_id: String,
    before: Before,
}

pub(crate) struct Settings {
    record: PathBuf,
    /// The record's content, to rewrite a removed file.
    known: Mutex<Option<Before>>,
}

impl Settings {
    /// `part`: infix of the record's file name; empty for forwarding.
    pub(crate) fn new(run_dir: &Path, part: &str) -> Self {
        Self { record: run_dir.join(format!("{RECORD_STEM}{part}json")), known: Mutex::default() }
    }

    /// `also`: settings that the kernel changes with a setting.
    pub(crate) fn change(
        &self,
        wanted: Vec<(String, &str)>,
        also: impl Fn(&str) -> Result<Vec<(String, String)>>,
    ) -> Result<()> {
        let mut before = self.changed()?;
        if wanted.is_empty() && (before.is_empty() || self.record.exists()) {
            return Ok(());
        }
        for (path, _) in &wanted {
            for (path, value) in also(path)?.into_iter().chain([(path.clone(), read(path)?)]) {
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

    /// Restores settings that have not changed since.
    pub(crate) fn take_back(&self) -> Result<()> {
        let before = self.changed()?;
        // Node-wide settings first: the kernel copies their value to each interface.
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

/// A forged record must not make the agent write other files.
fn is_ours(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    match parts.as_slice() {
        ["ipv4", "ip_forward"] | ["ipv4", "conf", "all", "accept_redirects"] => true,
        ["ipv4" | "ipv6", "conf", name, "forwarding"] | ["ipv6", "conf", name, "accept_ra" | "proxy_ndp"] => {
            ![".", ".."].contains(name)
        }
        _ => false,
    }
}

pub(crate) fn boot_id() -> Result<String> {
    let path = "/proc/sys/kernel/random/boot_id";
    Ok(fs::read_to_string(path).map_err(|e| wrap("read boot id", path, &e))?.trim().to_owned())
}

pub(crate) fn dotted(path: &str) -> String {
    format!("net.{}", path.replace('.', "\0").replace('/', ".").replace('\0', "/"))
}

pub(crate) fn read(path: &str) -> Result<String> {
    let text = fs::read_to_string(Path::new(ROOT).join(path)).map_err(|e| wrap("read setting", dotted(path), &e))?;
    Ok(text.trim().to_owned())
}

pub(crate) fn set(path: &str, value: &str) -> Result<()> {
    fs::write(Path::new(ROOT).join(path), value).map_err(|e| {
        let cause =
            format!("{e}; set it yourself (`sysctl -w {}={value}`), or start without what needs it (--masquerade off, --announce off)", dotted(path));
        fail(OPERATION, dotted(path), KernelErrorKind::Permission, cause)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_leads_to_what_is_changed_and_nowhere_else() {
        for yes in
            [FORWARD4, FORWARD6, "ipv6/conf/eth0.7/accept_ra", "ipv4/conf/br0/forwarding", "ipv6/conf/br0/proxy_ndp"]
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
