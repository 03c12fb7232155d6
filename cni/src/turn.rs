//! Serialises an attachment's commands with an IPAM plugin: a refused ADD or late DEL would release another ADD's
//! lease. The plugin inherits the lock and keeps it if `wharf-cni` is killed.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::io::FdFlags;
use wharf_handover::{IPAM_TURNS, queue::Queue};

use crate::{
    fault::{Code, Fault},
    log::Level,
    netconf::NetConf,
    request::Target,
};

const TRIED_EACH: Duration = Duration::from_millis(10);

/// Held until this process and the plugin have ended.
pub(crate) struct Turn {
    path: PathBuf,
    _locked: File,
}

impl Turn {
    /// `None` if the lock fails: the command runs unserialised.
    pub(crate) async fn take(
        conf: &NetConf,
        subject: &str,
        target: &Target,
        limit: Duration,
    ) -> Result<Option<Self>, Fault> {
        let directory = Queue::of_socket(&conf.socket).run_dir().join(IPAM_TURNS);
        let path = directory.join(Queue::file_name("", &target.container_id, &target.ifname));
        let until = Instant::now() + limit;
        loop {
            match Self::try_take(&directory, &path) {
                Ok(None) if Instant::now() >= until => {
                    let msg = format!(
                        "{subject}: another command of this attachment, or an IPAM plugin that outlived one, has not ended after {} s",
                        limit.as_secs()
                    );
                    return Err(Fault::new(Code::TryAgain, msg));
                }
                Ok(None) => tokio::time::sleep(TRIED_EACH).await,
                Ok(turn) => return Ok(turn),
                // No run directory: no agent, no endpoint.
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) => {
                    let text = format_args!("{subject}: goes on without a lock on {}: {e}", path.display());
                    conf.log.say(Level::Warn, text);
                    return Ok(None);
                }
            }
        }
    }

    fn try_take(directory: &Path, path: &Path) -> io::Result<Option<Self>> {
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(e)) => return Err(e),
        }
        // The last holder may have removed it.
        let own = file.metadata()?;
        if !fs::metadata(path).is_ok_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())) {
            return Ok(None);
        }
        rustix::io::fcntl_setfd(&file, FdFlags::empty())?;
        Ok(Some(Self { path: path.to_owned(), _locked: file }))
    }
}

impl Drop for Turn {
    /// Removed under the lock; waiters create another file.
    fn drop(&mut self) {
        let _gone_already = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_has_one_holder_and_a_process_that_it_started_keeps_it() {
        let directory = tempfile::tempdir().unwrap();
        let (turns, path) = (directory.path().join("turns"), directory.path().join("turns/x"));
        let take = || Turn::try_take(&turns, &path).unwrap();
        let turn = take().expect("free");
        assert!(take().is_none());
        drop(turn);
        assert_eq!(fs::read_dir(&turns).unwrap().count(), 0, "no file stays");

        let mut turn = take().expect("free again");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        turn.path = directory.path().join("another");
        drop(turn);
        assert!(take().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
