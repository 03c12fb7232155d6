//! Access of Envoy's user below directories that it may not enter.
//!
//! The new process keeps `CAP_DAC_READ_SEARCH` until exec to find the program; Envoy then uses relative paths. Where
//! the user can enter all parents, paths are absolute: they survive a replaced directory.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use nix::errno::Errno;

use super::{Envoy, EnvoyError, User};

impl Envoy {
    pub(super) fn is_reachable(&self) -> bool {
        self.user.is_none_or(|user| self.directory.ancestors().skip(1).all(|above| is_open(above, user)))
    }

    pub(super) fn as_envoy_sees(&self, path: PathBuf) -> PathBuf {
        if self.is_reachable() {
            return path;
        }
        path.strip_prefix(&self.directory).map(Path::to_owned).unwrap_or(path)
    }

    pub(super) fn cannot_start(&self, source: io::Error) -> EnvoyError {
        let hint = self.hint(&source);
        EnvoyError::Start { program: self.program.clone(), source, hint }
    }

    pub(super) fn has_bit(&self, file: &fs::Metadata) -> bool {
        file.mode() & self.user.map_or(0o111, |user| class(file, user)) != 0
    }

    fn hint(&self, why: &io::Error) -> String {
        let found = self.candidates().unwrap_or_default().into_iter().find(|path| path.exists());
        let program = found.as_deref().unwrap_or(&self.program);
        let path = program.display();
        let user = self.user.map_or_else(|| "the agent's user".to_owned(), |user| format!("user {}", user.uid));
        match why.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT) if self.is_bare() && found.is_none() => format!(
                "no directory of PATH ({}) has a program of this name: install Envoy in one of them, or set --envoy to its path",
                std::env::var_os("PATH").unwrap_or_default().display()
            ),
            Some(Errno::ENOENT) => {
                format!("{path} or its ELF interpreter is missing: install Envoy there, or set --envoy to its program")
            }
            Some(Errno::EPERM) => {
                format!("the agent needs CAP_SETUID, CAP_SETGID, CAP_NET_ADMIN and CAP_NET_RAW to run Envoy as {user}")
            }
            Some(Errno::EACCES) => {
                let file = fs::metadata(program).ok();
                if file.as_ref().is_some_and(|file| !file.is_file()) {
                    return format!("{path}: it is not a file; set --envoy to Envoy's program");
                }
                if let Some(file) = file.filter(|file| !self.has_bit(file)) {
                    let mode = file.mode() & 0o7777;
                    return format!("{user} may not execute it, because its mode is {mode:04o}: chmod o+x {path}");
                }
                let closed = |user: User| program.ancestors().skip(1).find(|above| !is_open(above, user));
                match self.user.and_then(closed) {
                    Some(above) => format!(
                        "{user} may not enter {}: give the agent CAP_DAC_READ_SEARCH, or install Envoy in a directory that is open to all users",
                        above.display()
                    ),
                    None => format!(
                        "{user} may not execute it: check for a file system mounted noexec, and for access control lists"
                    ),
                }
            }
            _ => format!("check that {user} can run `{path} --version`"),
        }
    }
}

/// Does not examine the target of a link.
fn is_open(directory: &Path, user: User) -> bool {
    let Ok(meta) = fs::symlink_metadata(directory) else { return false };
    meta.is_dir() && meta.mode() & class(&meta, user) != 0
}

/// The execute bit that decides for `user`: of owner, group or others. The user has no other groups.
fn class(meta: &fs::Metadata, user: User) -> u32 {
    match (meta.uid() == user.uid, meta.gid() == user.gid) {
        (true, _) => 0o100,
        (_, true) => 0o010,
        _ => 0o001,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn paths_are_relative_below_a_directory_that_the_user_cannot_enter() {
        let root = tempfile::tempdir().expect("a directory");
        let mode = |mode| fs::set_permissions(root.path(), fs::Permissions::from_mode(mode)).expect("a mode");
        let directory = root.path().join("proxy");
        let user = Some(User { uid: 65_534, gid: 65_534 });
        let program = root.path().join("envoy");
        fs::write(&program, "").expect("written");
        let envoy = Envoy { program, directory: directory.clone(), user, threads: 1, ends_with_agent: false };
        let seen = |envoy: &Envoy| envoy.as_envoy_sees(envoy.admin_socket());
        mode(0o755);
        assert_eq!(seen(&envoy), directory.join("admin/admin.sock"));
        mode(0o700);
        assert_eq!(seen(&envoy), Path::new("admin/admin.sock"));
        assert_eq!(seen(&Envoy { user: None, ..envoy.clone() }), directory.join("admin/admin.sock"), "root");

        let hint = |why: Errno| envoy.cannot_start(why.into()).to_string();
        fs::set_permissions(&envoy.program, fs::Permissions::from_mode(0o700)).expect("a mode");
        assert!(hint(Errno::EACCES).contains("0700: chmod o+x"));
        fs::set_permissions(&envoy.program, fs::Permissions::from_mode(0o711)).expect("a mode");
        let closed = format!("enter {}: give the agent CAP_DAC_READ_SEARCH", root.path().display());
        assert!(hint(Errno::EACCES).contains(&closed));
        assert!(hint(Errno::ENOENT).contains("--envoy"));
    }
}
