//! The client: one connection, and validation of answers.

use std::{
    error::Error as _,
    fmt, io,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::timeout};
use tonic::{
    Code, Request, Response, Status,
    codegen::{Service as TowerService, http::Uri},
    transport::{Channel, Endpoint},
};
use wharf_delegate::v1::{self, delegate_client::DelegateClient};

use crate::delegate::answer::{self, AnswerError, Failed, Made, Seen};

/// Bytes; full lists take half.
pub const MAX_ANSWER: usize = 64 * 1024;

/// Wait beyond a call's deadline.
const GRACE: Duration = Duration::from_millis(100);

/// Keep-alive interval; after it and [`PONG`], the client leaves a stopped service whose socket was taken over.
const PING: Duration = Duration::from_secs(10);
const PONG: Duration = Duration::from_secs(5);

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Nothing was sent.
    #[error("the service at {} cannot be reached: {why}", socket.display())]
    Unreachable {
        socket: PathBuf,
        /// Kernel error, or why the socket is not trusted.
        why: String,
    },
    /// The request may have run.
    #[error("the service at {} did not take it to its end: {why}", socket.display())]
    Broken {
        socket: PathBuf,
        /// Message of transport or service.
        why: String,
    },
    /// The request may still run.
    #[error("the service at {} gave no answer within {} ms", socket.display(), after.as_millis())]
    TimedOut {
        socket: PathBuf,
        /// Deadline.
        after: Duration,
    },
    /// The agent stops.
    #[error("the agent stops, and waits no longer for the service at {}", socket.display())]
    Stopping { socket: PathBuf },
    /// Another service has the socket.
    #[error("what answers at {} is no service of wharf.delegate.v1, or one of another version: {why}", socket.display())]
    Unimplemented {
        socket: PathBuf,
        /// Message of the responder.
        why: String,
    },
    /// A status that no service should use.
    #[error("the service at {} failed ({code:?}): {why}", socket.display())]
    Status {
        socket: PathBuf,
        /// gRPC code.
        code: Code,
        /// Message of the service.
        why: String,
    },
    /// An invalid answer.
    #[error("the answer of the service at {} cannot be used: {why}", socket.display())]
    Unusable {
        socket: PathBuf,
        /// Broken rule.
        why: AnswerError,
    },
    /// The service's failure.
    #[error("{}", .0.message)]
    Failed(Failed),
}

impl CallError {
    /// Whether later calls may succeed.
    #[must_use]
    pub fn is_away(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } | Self::TimedOut { .. } | Self::Stopping { .. } => true,
            Self::Unimplemented { .. } | Self::Status { .. } | Self::Unusable { .. } | Self::Failed(_) => false,
        }
    }

    /// Whether the request was not begun, or undone. [`Self::Unimplemented`] may also be an answer that the client
    /// cannot decompress.
    #[must_use]
    pub fn made_nothing(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Failed(_))
    }

    /// The attachment does not exist.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Failed(Failed { code: answer::UNKNOWN_CONTAINER, .. }))
    }
}

/// A client of the service.
#[derive(Debug)]
pub struct Service {
    socket: PathBuf,
    client: DelegateClient<Channel>,
}

impl Service {
    /// Connects later.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        // HTTP/2 requires a name.
        let endpoint = Endpoint::from_static("http://delegate")
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PONG)
            .keep_alive_while_idle(true);
        let channel = endpoint.connect_with_connector_lazy(Connector { socket: socket.to_owned() });
        Self { socket: socket.to_owned(), client: DelegateClient::new(channel).max_decoding_message_size(MAX_ANSWER) }
    }

    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Attaches a container.
    ///
    /// # Errors
    /// As [`CallError`]; a Del is owed unless it [made nothing](CallError::made_nothing).
    pub async fn add(&self, request: v1::AddRequest, limit: Duration) -> Result<Made, CallError> {
        let key = request.key.clone().unwrap_or_default();
        let mut client = self.client.clone();
        let answer = self.call(limit, client.add(timed(request.clone(), limit))).await?;
        let made = self.read(answer::made(answer, &key))?;
        match answer::as_leased(&made, &request) {
            Ok(()) => Ok(made),
            Err(why) => Err(CallError::Unusable { socket: self.socket.clone(), why }),
        }
    }

    /// Detaches a container.
    pub async fn del(&self, key: v1::AttachmentKey, limit: Duration) -> Result<(), CallError> {
        let mut client = self.client.clone();
        let answer = self.call(limit, client.del(timed(v1::DelRequest { key: Some(key) }, limit))).await?;
        self.read(answer::deleted(answer))
    }

    pub async fn check(&self, key: v1::AttachmentKey, limit: Duration) -> Result<Seen, CallError> {
        let mut client = self.client.clone();
        let request = v1::CheckRequest { key: Some(key.clone()) };
        let answer = self.call(limit, client.check(timed(request, limit))).await?;
        self.read(answer::seen(answer, &key))
    }

    /// Detaches unlisted attachments; returns their number.
    pub async fn gc(&self, request: v1::GcRequest, limit: Duration) -> Result<u32, CallError> {
        let mut client = self.client.clone();
        let answer = self.call(limit, client.gc(timed(request, limit))).await?;
        self.read(answer::collected(answer))
    }

    /// The service's name, if an Add would succeed.
    pub async fn status(&self, limit: Duration) -> Result<String, CallError> {
        let mut client = self.client.clone();
        let answer = self.call(limit, client.status(timed(v1::StatusRequest {}, limit))).await?;
        self.read(answer::ready(answer))
    }

    async fn call<T>(
        &self,
        limit: Duration,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, CallError> {
        let began = Instant::now();
        match timeout(limit.saturating_add(GRACE), call).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.failed(&status, limit, began.elapsed())),
            Err(_) => Err(CallError::TimedOut { socket: self.socket.clone(), after: limit }),
        }
    }

    fn read<T>(&self, answer: Result<Result<T, Failed>, AnswerError>) -> Result<T, CallError> {
        match answer {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(failed)) => Err(CallError::Failed(failed)),
            Err(why) => Err(CallError::Unusable { socket: self.socket.clone(), why }),
        }
    }

    /// Only the transport's statuses have a source.
    fn failed(&self, status: &Status, limit: Duration, took: Duration) -> CallError {
        let socket = self.socket.clone();
        if let Some(away) = cause::<Away>(status) {
            return CallError::Unreachable { socket, why: away.to_string() };
        }
        if cause::<tonic::TimeoutExpired>(status).is_some() {
            return CallError::TimedOut { socket, after: limit };
        }
        let why = answer::shown(status.message());
        match status.code() {
            // The service also counts the deadline, and may end the call first; tonic's servers answer Cancelled.
            Code::DeadlineExceeded | Code::Cancelled if took.saturating_add(GRACE) >= limit => {
                CallError::TimedOut { socket, after: limit }
            }
            Code::DeadlineExceeded | Code::Unavailable | Code::Cancelled | Code::Aborted | Code::ResourceExhausted => {
                CallError::Broken { socket, why }
            }
            Code::Unimplemented => CallError::Unimplemented { socket, why },
            Code::OutOfRange => CallError::Unusable { socket, why: AnswerError::TooLong },
            _ if status.source().is_some() => CallError::Broken { socket, why },
            code => CallError::Status { socket, code, why },
        }
    }
}

fn timed<T>(message: T, limit: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(limit);
    request
}

fn cause<T: std::error::Error + 'static>(status: &Status) -> Option<&T> {
    let mut error = status.source();
    while let Some(there) = error {
        if let Some(found) = there.downcast_ref() {
            return Some(found);
        }
        error = there.source();
    }
    None
}

#[derive(Debug, Clone)]
struct Connector {
    socket: PathBuf,
}

impl TowerService<Uri> for Connector {
    type Response = TokioIo<UnixStream>;
    type Error = Away;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Away>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Away>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let socket = self.socket.clone();
        Box::pin(async move {
            trusted(&socket)?;
            let stream = UnixStream::connect(&socket).await.map_err(Away::Io)?;
            // Another process may have replaced the file since.
            let peer = stream.peer_cred().map_err(Away::Io)?;
            if !is_ours(peer.uid()) {
                return Err(Away::Untrusted(format!("a process of user {} answers there", peer.uid())));
            }
            Ok(TokioIo::new(stream))
        })
    }
}

#[derive(Debug)]
enum Away {
    Io(io::Error),
    Untrusted(String),
}

impl fmt::Display for Away {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => error.fmt(f),
            Self::Untrusted(why) => {
                write!(f, "it is not trusted: {why}; it must be root's, and writable by nobody else")
            }
        }
    }
}

impl std::error::Error for Away {}

fn is_ours(uid: u32) -> bool {
    uid == 0 || uid == nix::unistd::geteuid().as_raw()
}

/// Another user must neither own the socket nor write to it.
fn trusted(socket: &Path) -> Result<(), Away> {
    let file = std::fs::symlink_metadata(socket).map_err(Away::Io)?;
    let refused = |why: String| Err(Away::Untrusted(why));
    if !file.file_type().is_socket() {
        return refused("it is no socket".to_owned());
    }
    if !is_ours(file.uid()) {
        return refused(format!("user {} owns it", file.uid()));
    }
    if file.mode() & 0o002 != 0 {
        return refused(format!("its mode {:o} lets everybody write to it", file.mode() & 0o7777));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_end_at_the_deadline_is_a_timeout_whoever_counted_it() {
        let service = Service::new(Path::new("/run/net.sock"));
        let limit = Duration::from_millis(300);
        for (code, took, timed_out) in [
            (Code::Cancelled, 290, true),
            (Code::DeadlineExceeded, 290, true),
            (Code::Cancelled, 100, false),
            (Code::DeadlineExceeded, 100, false),
            (Code::Unavailable, 290, false),
        ] {
            let error = service.failed(&Status::new(code, "Timeout expired"), limit, Duration::from_millis(took));
            assert_eq!(matches!(error, CallError::TimedOut { .. }), timed_out, "{code:?} after {took} ms: {error}");
            assert!(error.is_away(), "{error}");
        }
    }
}
