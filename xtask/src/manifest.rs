//! Manifest of an installation, `<prefix>/share/wharf/manifest`: a line `kind path` for each item. Paths omit `--root`.

use std::{
    collections::BTreeSet,
    fs, io,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, Result, bail};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// Created by install; removed when empty.
    Directory,
    /// Replaced by install, removed by uninstall.
    File,
    /// Kept if edited.
    Config,
    Group,
    User,
}

impl Kind {
    const ALL: [(Self, &'static str); 5] = [
        (Self::Directory, "dir"),
        (Self::File, "file"),
        (Self::Config, "config"),
        (Self::Group, "group"),
        (Self::User, "user"),
    ];

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, word)| word)
    }

    fn is_named(self) -> bool {
        matches!(self, Self::Group | Self::User)
    }

    fn from_word(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == word).map(|(kind, _)| *kind)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Manifest {
    items: BTreeSet<(Kind, PathBuf)>,
}

impl Manifest {
    pub(crate) fn add(&mut self, kind: Kind, path: &Path) {
        self.items.insert((kind, path.to_path_buf()));
    }

    pub(crate) fn contains(&self, kind: Kind, path: &Path) -> bool {
        self.items.contains(&(kind, path.to_path_buf()))
    }

    /// Folders before their content.
    pub(crate) fn of(&self, kind: Kind) -> impl DoubleEndedIterator<Item = &Path> {
        self.items.iter().filter(move |(found, _)| *found == kind).map(|(_, path)| path.as_path())
    }

    /// What uninstall leaves.
    pub(crate) fn left(&self, own: &Path, is_there: impl Fn(&Path) -> bool) -> Self {
        let stays = |(kind, path): &&(Kind, PathBuf)| match kind {
            Kind::File => path == own,
            Kind::Config => is_there(path),
            Kind::Directory | Kind::Group | Kind::User => true,
        };
        Self { items: self.items.iter().filter(stays).cloned().collect() }
    }

    pub(crate) fn read(file: &Path) -> Result<Option<Self>> {
        match fs::read_to_string(file) {
            Ok(text) => Self::parse(&text).map(Some).with_context(|| format!("read {}", file.display())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", file.display())),
        }
    }

    fn parse(text: &str) -> Result<Self> {
        let mut manifest = Self::default();
        for line in text.lines() {
            let item = line.split_once(' ').and_then(|(word, path)| Some((Kind::from_word(word)?, Path::new(path))));
            // Root trusts the manifest, so reject doubtful lines.
            match item {
                Some((kind, name)) if kind.is_named() && name.components().count() == 1 => manifest.add(kind, name),
                Some((kind, path)) if !kind.is_named() && plain(path) => manifest.add(kind, path),
                _ => bail!("line `{}` is not an item of a manifest", line.escape_debug()),
            }
        }
        Ok(manifest)
    }

    pub(crate) fn text(&self) -> String {
        self.items.iter().map(|(kind, path)| format!("{} {}\n", kind.word(), path.display())).collect()
    }
}

/// Whether a path is absolute, without `..` and control characters.
pub(crate) fn plain(path: &Path) -> bool {
    path.is_absolute()
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
        && path.to_str().is_some_and(|text| !text.chars().any(char::is_control))
}

pub(crate) fn below(root: Option<&Path>, path: &Path) -> PathBuf {
    match root {
        Some(root) => root.join(path.strip_prefix("/").unwrap_or(path)),
        None => path.to_path_buf(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_comes_back_as_it_was_written() -> Result<()> {
        let mut manifest = Manifest::default();
        manifest.add(Kind::File, Path::new("/usr/local/bin/wharf"));
        manifest.add(Kind::Directory, Path::new("/etc/wharf"));
        manifest.add(Kind::Config, Path::new("/etc/wharf/agent with blank.toml"));
        manifest.add(Kind::Group, Path::new("wharf"));
        manifest.add(Kind::User, Path::new("wharf-envoy"));
        assert_eq!(Manifest::parse(&manifest.text())?, manifest);
        Ok(())
    }

    #[test]
    fn lines_that_lead_elsewhere_are_refused() {
        for line in [
            "file ../etc/passwd",
            "file /usr/../etc/passwd",
            "file",
            "link /x",
            "file relative",
            "group a/b",
            "user /x",
        ] {
            assert!(Manifest::parse(line).is_err(), "{line}");
        }
    }

    #[test]
    fn paths_move_below_a_root() {
        assert_eq!(below(Some(Path::new("/stage")), Path::new("/etc/x")), Path::new("/stage/etc/x"));
        assert_eq!(below(None, Path::new("/etc/x")), Path::new("/etc/x"));
    }
}
