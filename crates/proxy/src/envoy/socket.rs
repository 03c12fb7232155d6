//! The xDS server's socket, bound again when its file is missing.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Interval, MissedTickBehavior},
};
use tonic::transport::server::{Connected, UdsConnectInfo};

use super::{Envoy, EnvoyError};

/// One per thread of Envoy. Excess connections wait in the backlog.
const MAX_CONNECTIONS: usize = 64;
const LOOK: Duration = Duration::from_secs(1);

type FileId = (u64, u64);

/// Socket for [`crate::Proxy::serve`]; retries a failed bind every second.
#[derive(Debug)]
pub struct Socket {
    envoy: Envoy,
    bound: Option<(UnixListener, FileId)>,
    /// The last bind error, logged once.
    problem: Option<String>,
    looks: Interval,
    permits: Arc<Semaphore>,
}

impl Socket {
    pub(super) fn new(envoy: Envoy) -> Self {
        let mut looks = tokio::time::interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut socket = Self { envoy, bound: None, problem: None, looks, permits };
        socket.look();
        socket
    }

    pub(crate) async fn accept(&mut self) -> Connection {
        loop {
            let Self { bound, looks, permits, .. } = self;
            let connection = async {
                let permit = Arc::clone(permits).acquire_owned().await.map_err(io::Error::other)?;
                let (stream, _) = match bound {
                    Some((listener, _)) => listener.accept().await?,
                    None => std::future::pending().await,
                };
                Ok::<_, io::Error>(Connection { stream, _permit: permit })
            };
            tokio::select! {
                // Connections to the old file are accepted first.
                biased;
                accepted = connection => match accepted {
                    Ok(connection) => return connection,
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept a connection of Envoy's");
                        looks.tick().await;
                    }
                },
                _ = looks.tick() => {}
            }
            self.look();
        }
    }

    fn look(&mut self) {
        let there = file_id(&self.envoy).ok();
        if there.is_some() && self.bound.as_ref().map(|(_, file)| *file) == there {
            return;
        }
        match self.bind() {
            Ok(bound) => {
                if self.bound.replace(bound).is_some() || self.problem.take().is_some() {
                    tracing::warn!(directory = %self.envoy.directory.display(), "the socket for Envoy is bound again");
                }
            }
            Err(error) => {
                let problem = error.to_string();
                if self.problem.as_ref() != Some(&problem) {
                    tracing::error!("Envoy cannot connect: {problem}; it is tried again");
                    self.problem = Some(problem);
                }
            }
        }
    }

    fn bind(&self) -> Result<(UnixListener, FileId), EnvoyError> {
        let listener = self.envoy.bind()?;
        // Existing settings tell the supervisor whether to replace Envoy.
        if !self.envoy.bootstrap_path().exists() {
            self.envoy.prepare()?;
        }
        let failed = |source| EnvoyError::File { operation: "look at", path: self.envoy.socket_path(), source };
        Ok((listener, file_id(&self.envoy).map_err(failed)?))
    }
}

fn file_id(envoy: &Envoy) -> io::Result<FileId> {
    fs::symlink_metadata(envoy.socket_path()).map(|file| (file.dev(), file.ino()))
}

#[derive(Debug)]
pub(crate) struct Connection {
    stream: UnixStream,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = UdsConnectInfo;

    fn connect_info(&self) -> UdsConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
