//! One request and its answer on one connection.

use std::{io, os::unix::fs::FileTypeExt as _, path::Path, pin::Pin, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Response, StatusCode,
    body::{Body, Incoming},
    client::conn::http1::{self, Connection, SendRequest},
    header,
};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time};

use super::{Call, Client, ClientError};

/// Longest body that is read, bytes: more than ten times the dump of the largest map.
pub const MAX_RESPONSE_BYTES: usize = 64 << 20;

/// Retry delay while the listener's queue is full; the agent drains it in microseconds.
const FULL_QUEUE_PAUSE: Duration = Duration::from_millis(5);

/// Connection I/O; must be polled together with the request.
pub(super) type Driver = Pin<Box<Connection<TokioIo<UnixStream>, Full<Bytes>>>>;

impl Client {
    /// Sends a request and reads its answer within the time limit.
    pub(super) async fn exchange(
        &self,
        call: &Call,
        body: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        self.limited(call, async {
            let (response, mut driver) = self.begin(call, body).await?;
            let status = response.status();
            let body = driven(&mut driver, read_all(call, response.into_body())).await?;
            Ok((status, body))
        })
        .await
    }

    pub(super) async fn limited<T>(
        &self,
        call: &Call,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        match time::timeout(self.timeout, work).await {
            Ok(result) => result,
            Err(_) => Err(ClientError::Timeout { operation: call.operation(), after: self.timeout }),
        }
    }

    /// Sends a request and reads the answer's head. The caller polls the driver while it reads the body; `None` means
    /// the connection has ended.
    pub(super) async fn begin(
        &self,
        call: &Call,
        body: Option<Vec<u8>>,
    ) -> Result<(Response<Incoming>, Option<Driver>), ClientError> {
        let mut request = Request::builder()
            .method(call.method.clone())
            .uri(&call.path)
            // HTTP/1.1 requires a host.
            .header(header::HOST, "wharf-agent")
            .header(header::ACCEPT, "application/json")
            .header(crate::UNTIL_HEADER, boot_ms().saturating_add(millis(self.timeout)));
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(command) = &self.command {
            request = request.header(crate::COMMAND_HEADER, command);
        }
        let request = request
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|e| call.protocol(format!("the request cannot be written: {e}")))?;

        let stream =
            connect(&self.socket).await.map_err(|cause| ClientError::Connect { socket: self.socket.clone(), cause })?;
        let (mut sender, connection): (SendRequest<Full<Bytes>>, _) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|e| broken(call, &e))?;
        let mut driver = Box::pin(connection);
        let mut answer = Box::pin(sender.send_request(request));
        tokio::select! {
            biased;
            response = &mut answer => {
                let response = response.map_err(|e| broken(call, &e))?;
                drop(answer);
                Ok((response, Some(driver)))
            }
            // The connection ended, with or without the answer's head.
            _ = &mut driver => Ok((answer.await.map_err(|e| broken(call, &e))?, None)),
        }
    }
}

fn boot_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::try_from(now).map_or(0, millis)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

async fn connect(socket: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(socket).await {
            // connect(2) on a unix socket returns EAGAIN while the listener's queue is full. The call's time limit
            // bounds the retries.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => time::sleep(FULL_QUEUE_PAUSE).await,
            // The kernel returns this error also for a path that is not a socket.
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && !is_socket(socket) => {
                let why = "this is not a socket; give the path of the agent's socket";
                return Err(io::Error::new(io::ErrorKind::ConnectionRefused, why));
            }
            result => return result,
        }
    }
}

/// True also when the path cannot be examined.
fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).map_or(true, |meta| meta.file_type().is_socket())
}

/// Drives the connection until `work` completes. At the connection's end, sets `driver` to `None`: it must
/// not be polled again.
pub(super) async fn driven<T>(driver: &mut Option<Driver>, work: impl Future<Output = T>) -> T {
    let mut work = std::pin::pin!(work);
    if let Some(connection) = driver {
        tokio::select! {
            biased;
            done = &mut work => return done,
            // `work` sees the error in the body.
            _ = connection => {}
        }
        *driver = None;
    }
    work.await
}

async fn read_all(call: &Call, mut body: Incoming) -> Result<Bytes, ClientError> {
    let too_large = || call.protocol(format!("the answer is longer than {MAX_RESPONSE_BYTES} bytes"));
    // Early rejection only; memory grows as bytes arrive.
    if body.size_hint().lower() > u64::try_from(MAX_RESPONSE_BYTES).unwrap_or(u64::MAX) {
        return Err(too_large());
    }
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| broken(call, &e))?;
        if let Ok(data) = frame.into_data() {
            if all.len().saturating_add(data.len()) > MAX_RESPONSE_BYTES {
                return Err(too_large());
            }
            all.extend_from_slice(&data);
        }
    }
    Ok(all.freeze())
}

pub(super) fn broken(call: &Call, error: &hyper::Error) -> ClientError {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        reason = format!("{reason}: {cause}");
        source = cause.source();
    }
    if error.is_parse() || error.is_user() {
        call.protocol(format!("the answer is not HTTP ({reason})"))
    } else {
        ClientError::Closed { operation: call.operation(), reason }
    }
}
