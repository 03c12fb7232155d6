//! The policy directory: its files' policies are wanted while the files exist.
//!
//! `*.yaml`, `*.yml` and `*.json` are read in order of name, without subdirectories and hidden files. The last good
//! text of a bad file stays in force, also across a start, which fails without one. Only a start reads files modified
//! in the last two seconds: they may be half-written.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, Metadata},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use wharf_enforce::documents::{MAX_TEXTS, Texts, by_name};
use wharf_kit::kept;
use wharf_policy::{
    model::{Policy, PolicyName},
    read::{MAX_TEXT, read},
};

use super::error::{PolicyError, told};

const MAX_FILES: usize = 10_000;
const SETTLES: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Age {
    Any,
    Settled,
}

/// Device, inode, size, modification time; change time (s, ns), which writers cannot set.
type Stamp = (u64, u64, u64, SystemTime, (i64, i64));

#[derive(Debug, Default)]
struct File {
    stamp: Option<Stamp>,
    text: Arc<str>,
    policies: Vec<Policy>,
    refused: Option<String>,
}

#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) policies: BTreeMap<PolicyName, Vec<Policy>>,
    pub(super) texts: Texts,
}

/// Whether a start without saved policies can use the directory.
///
/// # Errors
/// Unreadable directory or refused file.
pub fn check(directory: &Path) -> Result<(), PolicyError> {
    let mut files = Files::default();
    files.look(directory, Age::Any)?;
    let refused = files.files.values().find_map(|file| file.refused.clone());
    refused.map_or(Ok(()), |why| Err(PolicyError::Directory { path: directory.to_owned(), why }))
}

#[derive(Debug, Default)]
pub(super) struct Files {
    files: BTreeMap<PathBuf, File>,
    known: bool,
    changes: u64,
    unreadable: Option<PolicyError>,
    pub(super) not_taken: Option<PolicyError>,
    taken: BTreeMap<PolicyName, String>,
}

impl Files {
    /// Restores saved texts. A refused one is skipped; its file must then be good.
    pub(super) fn remember(&mut self, directory: &Path, kept: &Texts) {
        self.known = true;
        for (path, text) in kept.iter().filter(|(path, _)| Path::new(path).parent() == Some(directory)) {
            match read(path, text) {
                Ok(policies) => {
                    let file = File { text: Arc::clone(text), policies, ..File::default() };
                    self.files.insert(path.into(), file);
                }
                Err(refusals) => {
                    tracing::warn!("policy directory, as it was before the start: {}", told(&refusals));
                    self.known = false;
                }
            }
        }
    }

    pub(super) fn look(&mut self, directory: &Path, age: Age) -> Result<Found, PolicyError> {
        let read = self.read(directory, age);
        self.unreadable = read.as_ref().err().cloned();
        match read {
            Err(_) if age == Age::Any && self.known => {}
            other => other?,
        }
        Ok(self.found())
    }

    fn read(&mut self, directory: &Path, age: Age) -> Result<(), PolicyError> {
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
        let mut bytes: usize = self.files.values().map(|file| file.text.len()).sum();
        for path in there {
            let file = self.files.entry(path.clone()).or_default();
            bytes -= file.text.len();
            match fs::metadata(&path) {
                Ok(metadata) => self.changes += u64::from(file.renew(&path, &metadata, age, MAX_TEXTS - bytes)),
                Err(error) => file.refuse(&path, error.to_string()),
            }
            bytes += file.text.len();
        }
        let refused: Vec<&str> = self.files.values().filter_map(|file| file.refused.as_deref()).collect();
        if age == Age::Any && !self.known && !refused.is_empty() {
            let all = refused.join("\n");
            return Err(unreadable(format!(
                "{all}\na first start needs all files good: correct these, or remove them"
            )));
        }
        self.known = true;
        Ok(())
    }

    fn found(&mut self) -> Found {
        self.taken.clear();
        let mut found = Found::default();
        for (path, file) in &self.files {
            for (name, policies) in by_name(file.policies.clone()) {
                match found.policies.get(&name).and_then(|there| there.first()) {
                    Some(first) => {
                        let why = format!("{}: {name}: is in {} already", path.display(), first.origin);
                        self.taken.insert(name, why);
                    }
                    None => drop(found.policies.insert(name, policies)),
                }
            }
            if !file.text.is_empty() {
                found.texts.insert(path.display().to_string(), Arc::clone(&file.text));
            }
        }
        found
    }

    pub(super) fn changes(&self) -> u64 {
        self.changes
    }

    pub(super) fn refuse(&mut self, imported: BTreeSet<PolicyName>) {
        for name in imported {
            let why =
                format!("{name} is imported, too: delete it (`wharf policy delete`), or remove it from the directory");
            self.taken.insert(name, why);
        }
    }

    pub(super) fn problem(&self) -> Option<String> {
        let of_files = self.files.values().filter_map(|file| file.refused.clone());
        let whole = self.unreadable.iter().chain(&self.not_taken).map(ToString::to_string);
        let all: Vec<String> = whole.chain(of_files).chain(self.taken.values().cloned()).collect();
        (!all.is_empty()).then(|| all.join("\n"))
    }
}

impl File {
    /// Returns whether the content changed.
    fn renew(&mut self, path: &Path, metadata: &Metadata, age: Age, room: usize) -> bool {
        let Ok(modified) = metadata.modified() else { return false };
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        let stamp = (metadata.dev(), metadata.ino(), metadata.size(), modified, changed);
        let is_fresh = modified.elapsed().is_ok_and(|since| since < SETTLES);
        if self.stamp == Some(stamp) || age == Age::Settled && is_fresh {
            return false;
        }
        self.stamp = Some(stamp);
        match kept::read(path, MAX_TEXT as u64).map(|text| text.map(String::from_utf8)) {
            Ok(Some(Ok(text))) if text.len() > room => {
                self.refuse(
                    path,
                    format!("the directory's texts have more than {MAX_TEXTS} bytes with it; remove some"),
                );
            }
            Ok(Some(Ok(text))) => match read(&path.display().to_string(), &text) {
                Ok(policies) => {
                    (self.text, self.policies, self.refused) = (text.into(), policies, None);
                    return true;
                }
                Err(refusals) => self.say(told(&refusals)),
            },
            Ok(Some(Err(_))) => self.refuse(path, "it is not UTF-8".to_owned()),
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

#[cfg(test)]
mod tests {
    use std::fs::FileTimes;

    use super::*;

    fn policy(name: &str) -> String {
        format!(
            "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {name}}}\nspec: {{podSelector: {{}}}}\n"
        )
    }

    fn write(path: &Path, text: &str) {
        fs::write(path, text).expect("write");
        let times = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        fs::File::options().write(true).open(path).and_then(|file| file.set_times(times)).expect("set times");
    }

    fn names(found: Result<Found, PolicyError>) -> Vec<String> {
        found.expect("policies").policies.into_keys().map(|name| name.name).collect()
    }

    #[test]
    fn a_start_with_a_refused_file_fails_and_names_it() {
        let directory = tempfile::tempdir().expect("make directory");
        write(&directory.path().join("good.yaml"), &policy("good"));
        assert_eq!(names(Files::default().look(directory.path(), Age::Any)), ["good"]);
        let bad = directory.path().join("bad.yaml");
        for text in ["kind: NetworkPolicy\n", "apiVersion: [", &policy("UPPER")] {
            write(&bad, text);
            let why = Files::default().look(directory.path(), Age::Any).expect_err(text).to_string();
            assert!(why.contains("bad.yaml") && why.contains("correct"), "{why}");
            assert_eq!(
                names(Files::default().look(directory.path(), Age::Settled)),
                ["good"],
                "later it is told alone"
            );
        }
        fs::remove_file(&bad).expect("remove");
        std::os::unix::fs::symlink("nowhere", &bad).expect("link");
        assert!(Files::default().look(directory.path(), Age::Any).is_err());
    }

    #[test]
    fn a_start_that_knows_what_a_refused_file_said_leaves_that_in_force() {
        let directory = tempfile::tempdir().expect("make directory");
        let [one, two] = ["one", "two"].map(|name| (directory.path().join(format!("{name}.yaml")), policy(name)));
        for (file, text) in [&one, &two] {
            write(file, text);
        }
        let found = Files::default().look(directory.path(), Age::Any).expect("policies");
        write(&one.0, "apiVersion: [");
        write(&two.0, &policy("three"));
        write(&directory.path().join("new.yaml"), "apiVersion: [");
        let mut files = Files::default();
        files.remember(directory.path(), &found.texts);
        let found = files.look(directory.path(), Age::Any).expect("policies");
        assert_eq!(found.texts[one.0.to_str().expect("a path")].as_ref(), one.1);
        assert_eq!(names(Ok(found)), ["one", "three"]);
        let problem = files.problem().expect("a problem");
        assert!(
            problem.contains("one.yaml") && problem.contains("stays in force") && problem.contains("new.yaml"),
            "{problem}"
        );

        let kept = files.look(directory.path(), Age::Any).expect("policies").texts;
        let gone = directory.path().join("gone");
        let elsewhere: Texts =
            kept.values().map(|text| (gone.join("a.yaml").display().to_string(), Arc::clone(text))).collect();
        let mut files = Files::default();
        files.remember(&gone, &elsewhere);
        assert_eq!(names(files.look(&gone, Age::Any)).len(), 1);
        let mut files = Files::default();
        files.remember(&gone, &kept);
        assert_eq!(names(files.look(&gone, Age::Any)), [""; 0]);
        assert!(files.problem().is_some_and(|why| why.starts_with("read the policy directory")));
    }

    #[test]
    fn a_file_beyond_the_bound_of_all_is_refused_and_the_others_are_taken() {
        let directory = tempfile::tempdir().expect("make directory");
        let filler = format!("# {}\n", "x".repeat(MAX_TEXT - 1_000));
        for name in ["a", "b", "c", "d", "e"] {
            write(&directory.path().join(name).with_extension("yaml"), &(filler.clone() + &policy(name)));
        }
        let mut files = Files::default();
        assert_eq!(names(files.look(directory.path(), Age::Settled)), ["a", "b", "c", "d"]);
        assert!(files.problem().is_some_and(|why| why.contains("e.yaml") && why.contains("remove some")));
    }

    #[test]
    fn another_content_of_the_same_size_and_time_is_seen() {
        let directory = tempfile::tempdir().expect("make directory");
        let (file, mut files) = (directory.path().join("a.yaml"), Files::default());
        for name in ["one", "two"] {
            write(&file, &policy(name));
            assert_eq!(names(files.look(directory.path(), Age::Settled)), [name]);
        }
    }

    #[test]
    fn a_directory_that_cannot_be_read_is_a_problem_until_it_is_back() {
        let root = tempfile::tempdir().expect("make directory");
        let (directory, mut files) = (root.path().join("policies"), Files::default());
        assert!(files.look(&directory, Age::Settled).is_err());
        let problem = files.problem().expect("a problem");
        assert!(problem.starts_with("read the policy directory"), "{problem}");
        fs::create_dir(&directory).expect("make it");
        assert_eq!(names(files.look(&directory, Age::Settled)), [""; 0]);
        assert_eq!(files.problem(), None);
    }
}
