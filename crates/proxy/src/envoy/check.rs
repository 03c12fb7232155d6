//! Checks whether Envoy's program would be executed: a child becomes Envoy's user and asks the kernel. Without
//! permission for that, file modes decide.

use std::{
    ffi::{CStr, CString},
    fs, io,
    os::unix::{ffi::OsStrExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use nix::{errno::Errno, libc};

use super::{Envoy, EnvoyError, launch::set_up_process};

/// Search path of the C library's execvp(3) without `PATH`.
const DEFAULT_PATH: &str = "/bin:/usr/bin";
/// The child's system calls never have this error.
const EXECUTABLE: Errno = Errno::ECANCELED;

impl Envoy {
    /// Checks the program without running it. Returns a reason if this process could not examine it.
    ///
    /// # Errors
    /// The program is missing, or Envoy's user may not execute it.
    pub fn check_program(&self) -> Result<Option<String>, EnvoyError> {
        let failed = |source| self.cannot_start(source);
        let paths = self.candidates().map_err(failed)?;
        let name = |path: &PathBuf| CString::new(path.as_os_str().as_bytes());
        let names: Vec<CString> = paths.iter().map(name).collect::<Result<_, _>>().map_err(|e| failed(e.into()))?;
        let user = self.user;
        // Never executed: the closure fails.
        let mut command = Command::new("/dev/null");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // SAFETY: between fork and exec the closure only makes system calls: no allocation, no lock.
        unsafe {
            command.pre_exec(move || {
                set_up_process(user, None)?;
                Err(first_executable(&names).err().unwrap_or(EXECUTABLE).into())
            });
        }
        match command.spawn() {
            Ok(mut child) => child.wait().map(|_| None).map_err(failed),
            Err(error) => match error.raw_os_error().map(Errno::from_raw) {
                Some(EXECUTABLE) => Ok(None),
                // No permission, or the kernel lacks the call.
                Some(Errno::EPERM | Errno::ENOSYS) => self.examine(&paths),
                _ => Err(failed(error)),
            },
        }
    }

    /// A bare name is searched in `PATH`.
    pub(super) fn candidates(&self) -> io::Result<Vec<PathBuf>> {
        if self.is_bare() {
            let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
            return Ok(std::env::split_paths(&path).map(|directory| directory.join(&self.program)).collect());
        }
        Ok(vec![std::path::absolute(&self.program)?])
    }

    pub(super) fn is_bare(&self) -> bool {
        self.program.components().count() == 1 && !self.program.has_root()
    }

    fn examine(&self, paths: &[PathBuf]) -> Result<Option<String>, EnvoyError> {
        let (mut denied, mut hidden) = (false, None);
        for path in paths {
            match fs::metadata(path) {
                Ok(file) if file.is_file() && self.has_bit(&file) => return Ok(None),
                Ok(_) => denied = true,
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    hidden.get_or_insert(path);
                }
                Err(error) if is_absence(&error) => {}
                Err(error) => return Err(self.cannot_start(error)),
            }
        }
        match hidden {
            Some(path) => Ok(Some(cannot_examine(path))),
            None if denied => Err(self.cannot_start(Errno::EACCES.into())),
            None => Err(self.cannot_start(Errno::ENOENT.into())),
        }
    }
}

fn cannot_examine(path: &Path) -> String {
    format!("not checked: user {} may not examine {}; run the check as root", nix::unistd::geteuid(), path.display())
}

fn is_absence(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Like execvp(3): the first executable, or the error.
fn first_executable(paths: &[CString]) -> Result<(), Errno> {
    let mut denied = false;
    for path in paths {
        match may_execute(path) {
            Ok(()) => return Ok(()),
            Err(Errno::ENOENT | Errno::ENOTDIR) => {}
            Err(Errno::EACCES) => denied = true,
            Err(errno) => return Err(errno),
        }
    }
    Err(if denied { Errno::EACCES } else { Errno::ENOENT })
}

fn may_execute(path: &CStr) -> Result<(), Errno> {
    if nix::sys::stat::stat(path)?.st_mode & libc::S_IFMT != libc::S_IFREG {
        return Err(Errno::EACCES);
    }
    // Unlike access(2), with the effective capabilities.
    // SAFETY: the path is a string that outlives the call.
    let result =
        unsafe { libc::syscall(libc::SYS_faccessat2, libc::AT_FDCWD, path.as_ptr(), libc::X_OK, libc::AT_EACCESS) };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::envoy::User;

    fn envoy(program: PathBuf) -> Envoy {
        let user = Some(User { uid: 65_534, gid: 65_534 });
        Envoy { program, directory: "/nowhere/proxy".into(), user, threads: 1, ends_with_agent: false }
    }

    #[test]
    fn a_bare_name_is_looked_up_in_path_as_a_start_does() {
        assert_eq!(envoy("sleep".into()).check_program().expect("it is in PATH"), None);
        let why = envoy("wharf-no-such-program".into()).check_program().expect_err("in no directory").to_string();
        assert!(why.contains("wharf-no-such-program") && why.contains("PATH"), "{why}");
    }

    #[test]
    fn a_program_is_checked_by_the_rule_of_a_start() {
        let root = tempfile::tempdir().expect("a directory");
        let set_mode = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("a mode");
        };
        let program = root.path().join("envoy");
        fs::write(&program, "").expect("written");
        set_mode(&program, 0o755);
        for mode in [0o755, 0o700] {
            set_mode(root.path(), mode);
            assert_eq!(envoy(program.clone()).check_program().expect("it starts"), None, "{mode:o}");
        }
        set_mode(root.path(), 0o755);
        set_mode(&program, 0o700);
        let why = |program: PathBuf| envoy(program).check_program().expect_err("it does not start").to_string();
        assert!(why(program.clone()).contains("0700: chmod o+x"), "{}", why(program));
        let directory = root.path().join("directory");
        fs::create_dir(&directory).expect("made");
        assert!(why(directory.clone()).contains("it is not a file"), "{}", why(directory));
        let absent = root.path().join("absent");
        assert!(why(absent.clone()).contains("is missing"), "{}", why(absent));
    }

    #[test]
    fn a_name_that_cannot_be_executed_in_one_directory_is_looked_up_in_the_next() {
        let root = tempfile::tempdir().expect("a directory");
        let [closed, absent] = ["closed", "absent"].map(|name| root.path().join(name));
        fs::write(&closed, "").expect("written");
        let name = |path: &Path| CString::new(path.as_os_str().as_bytes()).expect("a path");
        let sleep =
            name(&envoy("sleep".into()).candidates().expect("paths").into_iter().find(|p| p.exists()).expect("sleep"));
        let first =
            |paths: &[&CString]| first_executable(&paths.iter().map(|path| (*path).clone()).collect::<Vec<_>>());
        assert_eq!(first(&[&name(&closed), &name(&absent), &sleep]), Ok(()));
        assert_eq!(first(&[&name(&absent)]), Err(Errno::ENOENT));
        assert_eq!(first(&[&name(&closed), &name(&absent)]), Err(Errno::EACCES));
        assert_eq!(first(&[&name(root.path())]), Err(Errno::EACCES), "a directory");
    }
}
