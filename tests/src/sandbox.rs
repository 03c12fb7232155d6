//! A stand-in for a container: a network namespace with a name, as a container runtime makes it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, umount2};

use crate::space::Space;

/// A network namespace bound to a file; its name serves as the CNI container id.
#[derive(Debug)]
pub struct Sandbox {
    name: String,
    path: PathBuf,
    space: Option<Space>,
}

impl Sandbox {
    /// Makes one, bound to `<dir>/<name>`.
    ///
    /// # Errors
    /// Without root, or when the name is taken.
    pub fn create(dir: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        let space = Space::create()?;
        let path = dir.join(name);
        space.bind(&path)?;
        Ok(Self { name: name.to_owned(), path, space: Some(space) })
    }

    /// CNI container id.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the runtime passes as CNI_NETNS.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The namespace.
    ///
    /// # Errors
    /// After [`Self::vanish`].
    pub fn space(&self) -> Result<&Space> {
        self.space.as_ref().with_context(|| format!("sandbox {} is gone", self.name))
    }

    /// The container's end: the name goes, and with its last holder the namespace. Endpoints in it are not told.
    ///
    /// # Errors
    /// When the name cannot be unmounted.
    pub fn vanish(&mut self) -> Result<()> {
        self.space = None;
        umount2(&self.path, MntFlags::MNT_DETACH).with_context(|| format!("unmount {}", self.path.display()))?;
        fs::remove_file(&self.path).with_context(|| format!("remove {}", self.path.display()))
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if self.space.is_some() {
            // The mount namespace ends with the test and takes the name along; an error here loses nothing.
            self.vanish().ok();
        }
    }
}
