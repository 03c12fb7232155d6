//! Envoy's directory and its files.
//!
//! | file | owner, mode | content |
//! |---|---|---|
//! | `.` | agent:group 0750 | |
//! | `xds.sock` | agent:group 0660 | the server's socket |
//! | `bootstrap.json` | agent:group 0640 | Envoy's settings |
//! | `envoy.pid` | agent 0644 | number and start time of the last started process |
//! | `told.pid` | agent 0644 | the same of the last process that received listeners |
//! | `admin/` | user:group 0700 | socket of Envoy's admin interface |

use std::{
    fs, io,
    os::fd::AsRawFd,
    os::unix::fs::{PermissionsExt, chown},
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};
use tokio::net::UnixListener;

use super::{Envoy, EnvoyError, Socket};
use crate::{
    bootstrap::bootstrap,
    process::{Process, ProcessId},
    proxy::Proxy,
    shares::Connections,
};

impl Envoy {
    /// Socket for [`Proxy::serve`]; replaces an earlier agent's.
    #[must_use]
    pub fn socket(&self) -> Socket {
        Socket::new(self.clone())
    }

    pub(super) fn bind(&self) -> Result<UnixListener, EnvoyError> {
        self.ensure_directory()?;
        let path = self.socket_path();
        remove(&path)?;
        let socket = UnixListener::bind(&path).map_err(failed("bind", &path))?;
        self.give(&path, 0o660)?;
        Ok(socket)
    }

    /// Socket of Envoy's admin interface (HTTP/1.1).
    #[must_use]
    pub fn admin_socket(&self) -> PathBuf {
        self.directory.join("admin/admin.sock")
    }

    /// Path of Envoy's settings.
    #[must_use]
    pub fn bootstrap_path(&self) -> PathBuf {
        self.directory.join("bootstrap.json")
    }

    pub(super) fn socket_path(&self) -> PathBuf {
        self.directory.join("xds.sock")
    }

    fn pid_path(&self) -> PathBuf {
        self.directory.join("envoy.pid")
    }

    fn ensure_directory(&self) -> Result<(), EnvoyError> {
        fs::create_dir_all(&self.directory).map_err(failed("create", &self.directory))?;
        self.give(&self.directory, 0o750)
    }

    fn ensure_admin_directory(&self, replaces: bool) -> Result<(), EnvoyError> {
        let (admin, socket) = (self.directory.join("admin"), self.admin_socket());
        fs::create_dir_all(&admin).map_err(failed("create", &admin))?;
        self.take_back()?;
        fs::set_permissions(&admin, fs::Permissions::from_mode(0o700)).map_err(failed("set the mode of", &admin))?;
        if replaces || is_stale(&socket) {
            remove(&socket)?;
        }
        if let Some(user) = self.user {
            chown(&admin, Some(user.uid), Some(user.gid)).map_err(failed("change the owner of", &admin))?;
        }
        Ok(())
    }

    /// An agent without CAP_DAC_OVERRIDE and CAP_FOWNER can remove only its own files.
    pub(super) fn take_back(&self) -> Result<(), EnvoyError> {
        let admin = self.directory.join("admin");
        match chown(&admin, Some(nix::unistd::geteuid().as_raw()), None) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("change the owner of", &admin)(error)),
            _ => Ok(()),
        }
    }

    fn give(&self, path: &Path, mode: u32) -> Result<(), EnvoyError> {
        if let Some(user) = self.user {
            chown(path, None, Some(user.gid)).map_err(failed("change the group of", path))?;
        }
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(failed("set the mode of", path))
    }

    pub(super) fn settings(&self) -> String {
        let (socket, admin) = (self.as_envoy_sees(self.socket_path()), self.as_envoy_sees(self.admin_socket()));
        format!("{:#}\n", bootstrap(&socket, &admin, Connections::here(), self.user))
    }

    /// Writes the settings of an unsupervised Envoy, and removes a stale socket.
    ///
    /// # Errors
    /// A file could not be written or removed.
    pub fn prepare(&self) -> Result<(), EnvoyError> {
        self.make_ready(false)
    }

    pub(super) fn prepare_to_launch(&self) -> Result<(), EnvoyError> {
        self.make_ready(true)
    }

    fn make_ready(&self, replaces: bool) -> Result<(), EnvoyError> {
        self.ensure_directory()?;
        self.ensure_admin_directory(replaces)?;
        let path = self.bootstrap_path();
        fs::write(&path, self.settings()).map_err(failed("write", &path))?;
        self.give(&path, 0o640)
    }

    pub(super) fn note(&self, process: &Process) -> Result<(), EnvoyError> {
        note(&self.pid_path(), process.id)
    }

    /// Finds the Envoy with an earlier agent's listeners, and makes the proxy record the process that receives this
    /// agent's. Call it before [`Proxy::serve`].
    ///
    /// Without a record, this directory's mark finds the process if this agent starts Envoy (`supervised`); otherwise
    /// that Envoy can belong to another program.
    ///
    /// # Errors
    /// The record file or the process list could not be read.
    pub fn remember(&self, proxy: &Proxy, supervised: bool) -> Result<(), EnvoyError> {
        let path = self.directory.join("told.pid");
        let process = noted(&path)?;
        let is_lost = supervised && process.is_none() && !path.exists() && self.noted()?.is_none();
        let process = if is_lost { self.marked()?.pop() } else { process };
        proxy.shared.lock().told = Some(path);
        if let Some(process) = process {
            tracing::info!(pid = process.id.pid, "Envoy has listeners of an earlier agent");
            proxy.shared.inherit(process);
        }
        Ok(())
    }

    pub(super) fn noted(&self) -> Result<Option<Process>, EnvoyError> {
        noted(&self.pid_path())
    }

    pub(super) fn settings_are_current(&self) -> bool {
        fs::read_to_string(self.bootstrap_path()).is_ok_and(|text| text == self.settings())
    }
}

pub(crate) fn note(path: &Path, process: ProcessId) -> Result<(), EnvoyError> {
    // Atomic: a partial number would name another process.
    let fresh = path.with_extension("new");
    let text = format!("{} {}\n", process.pid, process.started);
    fs::write(&fresh, text).map_err(failed("write", &fresh))?;
    fs::rename(&fresh, path).map_err(failed("rename", &fresh))
}

fn noted(path: &Path) -> Result<Option<Process>, EnvoyError> {
    let text = match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => result.map_err(failed("read", path))?,
    };
    let mut words = text.split_ascii_whitespace();
    let (Some(Ok(pid)), Some(Ok(started))) = (words.next().map(str::parse), words.next().map(str::parse::<u64>)) else {
        return Ok(None);
    };
    match Process::find(pid).map_err(|source| EnvoyError::Process { operation: "look at", pid, source })? {
        Some(process) if process.id.started == started && !process.has_ended() => Ok(Some(process)),
        _ => Ok(None),
    }
}

fn is_stale(path: &Path) -> bool {
    // A full backlog must not block.
    let kind = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let connected = socket(AddressFamily::Unix, SockType::Stream, kind, None)
        .and_then(|socket| connect(socket.as_raw_fd(), &UnixAddr::new(path)?));
    connected == Err(Errno::ECONNREFUSED)
}

fn remove(path: &Path) -> Result<(), EnvoyError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

fn failed(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> EnvoyError {
    move |source| EnvoyError::File { operation, path: path.to_path_buf(), source }
}
