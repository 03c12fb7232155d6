//! The policy directory: what its files say is wanted as long as they are there.
//!
//! `*.yaml`, `*.yml` and `*.json` are read in the order of their names; subdirectories and names that begin with a dot are left
//! out. A file that is refused, or cannot be read, leaves in force what it said before. A file that changed within the last two
//! seconds may be half-written: it is read at a later look.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use wharf_policy::{
    model::{Policy, PolicyName},
    read::{MAX_TEXT, read},
};

use super::{
    documents::{by_name, told},
    error::PolicyError,
};
use crate::kept;

/// Files that are read.
const MAX_FILES: usize = 10_000;
/// How long a file is left alone after it was written.
const SETTLES: Duration = Duration::from_secs(2);

/// Which files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Age {
    /// All: at a start there is nothing to leave in force.
    Any,
    /// Those that nobody writes any more.
    Settled,
}

/// Device, inode, size and time of the last change: another one is another content.
type Stamp = (u64, u64, u64, SystemTime);

#[derive(Debug, Default)]
struct File {
    stamp: Option<Stamp>,
    /// What it said when it was last good.
    policies: Vec<Policy>,
    refused: Option<String>,
}

/// What was last found.
#[derive(Debug, Default)]
pub(super) struct Files {
    files: BTreeMap<PathBuf, File>,
    /// How often what they say changed.
    changes: u64,
    /// Policies that another source has.
    taken: BTreeMap<PolicyName, String>,
}

impl Files {
    /// Reads what changed, and answers all policies of the directory.
    pub(super) fn look(
        &mut self,
        directory: &Path,
        age: Age,
    ) -> Result<BTreeMap<PolicyName, Vec<Policy>>, PolicyError> {
        let unreadable = |why: String| PolicyError::Directory { path: directory.to_owned(), why };
        let mut there = BTreeSet::new();
        for entry in fs::read_dir(directory).map_err(|e| unreadable(e.to_string()))? {
            let path = entry.map_err(|e| unreadable(e.to_string()))?.path();
            let is_hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
            let is_policy = path.extension().is_some_and(|e| e == "yaml" || e == "yml" || e == "json");
            if is_policy && !is_hidden && !path.is_dir() {
                there.insert(path);
            }
            if there.len() > MAX_FILES {
                return Err(unreadable(format!("more than {MAX_FILES} files; remove some")));
            }
        }
        let before = self.files.len();
        self.files.retain(|path, _| there.contains(path));
        self.changes += u64::from(self.files.len() != before);
        for path in there {
            let file = self.files.entry(path.clone()).or_default();
            // Of a symbolic link, what it leads to.
            match fs::metadata(&path) {
                Ok(metadata) => self.changes += u64::from(file.renew(&path, &metadata, age)),
                Err(error) => file.refuse(&path, error.to_string()),
            }
        }
        self.taken.clear();
        let mut all: BTreeMap<PolicyName, Vec<Policy>> = BTreeMap::new();
        for (path, file) in &self.files {
            for (name, policies) in by_name(file.policies.clone()) {
                match all.get(&name).and_then(|there| there.first()) {
                    Some(first) => {
                        let why = format!("{}: {name}: is in {} already", path.display(), first.origin);
                        self.taken.insert(name, why);
                    }
                    None => drop(all.insert(name, policies)),
                }
            }
        }
        Ok(all)
    }

    /// Another number says that the files may say something else.
    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    /// These policies are imported, and stay as they were imported.
    pub(super) fn refuse(&mut self, imported: BTreeSet<PolicyName>) {
        for name in imported {
            let why =
                format!("{name} is imported, too: delete it (`wharf policy delete`), or remove it from the directory");
            self.taken.insert(name, why);
        }
    }

    /// What is refused, one a line.
    pub(super) fn problem(&self) -> Option<String> {
        let of_files = self.files.values().filter_map(|file| file.refused.clone());
        let all: Vec<String> = of_files.chain(self.taken.values().cloned()).collect();
        (!all.is_empty()).then(|| all.join("\n"))
    }
}

impl File {
    /// Reads the file if it changed. True if it says something else now.
    fn renew(&mut self, path: &Path, metadata: &Metadata, age: Age) -> bool {
        let Ok(modified) = metadata.modified() else { return false };
        let stamp = (metadata.dev(), metadata.ino(), metadata.size(), modified);
        // A time in the future is no reason to wait.
        let is_fresh = modified.elapsed().is_ok_and(|since| since < SETTLES);
        if self.stamp == Some(stamp) || age == Age::Settled && is_fresh {
            return false;
        }
        self.stamp = Some(stamp);
        match kept::read(path, MAX_TEXT as u64).map(|text| text.map(String::from_utf8)) {
            Ok(Some(Ok(text))) => match read(&path.display().to_string(), &text) {
                Ok(policies) => {
                    (self.policies, self.refused) = (policies, None);
                    return true;
                }
                Err(refusals) => self.say(told(&refusals)),
            },
            Ok(Some(Err(_))) => self.refuse(path, "it is not UTF-8".to_owned()),
            // It went away since the directory was read.
            Ok(None) => {}
            Err(error) => self.refuse(path, error.to_string()),
        }
        false
    }

    fn refuse(&mut self, path: &Path, why: String) {
        self.say(format!("{}: {why}", path.display()));
    }

    fn say(&mut self, why: String) {
        let left = if self.policies.is_empty() { "" } else { "; what it said before stays in force" };
        let why = format!("{why}{left}");
        if self.refused.as_ref() != Some(&why) {
            tracing::warn!("policy directory: {why}");
            self.refused = Some(why);
        }
    }
}
