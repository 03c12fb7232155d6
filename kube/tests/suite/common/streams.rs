//! Bodies of the scripted API server.

use std::{io, time::Duration};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use http::{Response, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout_at},
};
use wharf_kube::source::Source;

use super::server::{Fault, Server};

pub type ScriptedBody = UnsyncBoxBody<Bytes, io::Error>;

/// Between bookmarks; a real server has a minute.
const BOOKMARK: Duration = Duration::from_secs(7);

/// How a running watch ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchFault {
    /// Without an error.
    End,
    /// The connection is reset within an event.
    Cut,
    /// The body ends within an event, without an error.
    Truncate,
    /// No byte comes any more: a half-open connection.
    Silence,
    /// An ERROR event with this status.
    Error(u16),
    /// A line that is no JSON.
    Garbage,
}

fn body(parts: impl Stream<Item = Result<Bytes, io::Error>> + Send + 'static) -> ScriptedBody {
    StreamBody::new(parts.map(|part| part.map(Frame::data))).boxed_unsync()
}

pub fn object(value: &Value) -> Response<ScriptedBody> {
    Response::new(body(stream::iter([Ok(Bytes::from(value.to_string()))])))
}

fn status_object(code: u16) -> Value {
    let reason = match code {
        404 => "NotFound",
        410 => "Expired",
        429 => "TooManyRequests",
        504 => "Timeout",
        _ => "Scripted",
    };
    json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "scripted"})
}

pub fn status(code: u16, retry_after: Option<u64>) -> Response<ScriptedBody> {
    let mut answer = object(&status_object(code));
    *answer.status_mut() = code.try_into().expect("a status");
    if let Some(seconds) = retry_after {
        answer.headers_mut().insert(header::RETRY_AFTER, seconds.into());
    }
    answer
}

/// The connection is reset before the first byte of the body.
pub fn reset() -> Response<ScriptedBody> {
    Response::new(body(stream::iter([Err(io::ErrorKind::ConnectionReset.into())])))
}

/// Applies a fault of the body.
pub fn damage(answer: Response<ScriptedBody>, fault: Option<Fault>) -> Response<ScriptedBody> {
    let half = Bytes::from_static(b"{\"metadata\": {");
    match fault {
        Some(Fault::Cut) => answer.map(|_| body(stream::iter([Ok(half), Err(io::ErrorKind::ConnectionReset.into())]))),
        Some(Fault::Stall) => answer.map(|_| body(stream::iter([Ok(half)]).chain(stream::pending()))),
        Some(Fault::Garbage) => answer.map(|_| body(stream::iter([Ok(Bytes::from_static(b"<html>\n"))]))),
        _ => answer,
    }
}

pub struct WatchStream {
    server: Server,
    changes: watch::Receiver<()>,
    source: Source,
    /// Version of the last event or bookmark.
    at: u64,
    end: Instant,
    /// Number of the last fault when the watch began.
    broken: u64,
    is_over: bool,
}

enum Next {
    Part(Result<Bytes, io::Error>),
    Fault(WatchFault),
    Wait,
    End,
}

impl WatchStream {
    pub fn new(server: Server, source: Source, at: u64, limit: Duration, broken: u64) -> Self {
        let changes = server.changes();
        Self { server, changes, source, at, end: Instant::now() + limit, broken, is_over: false }
    }

    pub fn into_answer(self) -> Response<ScriptedBody> {
        let parts = stream::unfold(self, |mut watch| async move {
            let part = watch.part().await?;
            Some((part, watch))
        });
        Response::new(body(parts))
    }

    async fn part(&mut self) -> Option<Result<Bytes, io::Error>> {
        loop {
            match self.next() {
                Next::End => return None,
                Next::Part(part) => return Some(part),
                Next::Fault(WatchFault::End) => return None,
                Next::Fault(WatchFault::Silence) => std::future::pending().await,
                Next::Fault(fault) => {
                    self.is_over = true;
                    let line = |value: Value| Bytes::from(format!("{value}\n"));
                    return Some(Ok(match fault {
                        WatchFault::Cut => return Some(Err(io::ErrorKind::ConnectionReset.into())),
                        WatchFault::Error(code) => line(json!({"type": "ERROR", "object": status_object(code)})),
                        WatchFault::Garbage => Bytes::from_static(b"{garbage}\n"),
                        _ => Bytes::from_static(b"{\"type\": \"ADDED\", \"obj"),
                    }));
                }
                Next::Wait => {
                    let bookmark = Instant::now() + BOOKMARK;
                    if bookmark < self.end {
                        if timeout_at(bookmark, self.changes.changed()).await.is_err() {
                            let version = self.server.lock().version;
                            // A restored store does not send a bookmark to a watch of another history.
                            if version >= self.at {
                                self.at = version;
                                let metadata =
                                    json!({"resourceVersion": version.to_string(), "creationTimestamp": null});
                                let bookmark = json!({"type": "BOOKMARK", "object": {"metadata": metadata}});
                                return Some(Ok(Bytes::from(format!("{bookmark}\n"))));
                            }
                        }
                    } else {
                        tokio::select! {
                            () = sleep_until(self.end) => return None,
                            changed = self.changes.changed() => changed.ok()?,
                        }
                    }
                }
            }
        }
    }

    fn next(&mut self) -> Next {
        if self.is_over || Instant::now() >= self.end {
            return Next::End;
        }
        let world = self.server.lock();
        if let (number, Some(fault)) = world.broken
            && number > self.broken
        {
            // A later end does not hide the restart of a restored store.
            let restarted = world.restored > self.broken && number > world.restored;
            return Next::Fault(if restarted && fault == WatchFault::End { WatchFault::Cut } else { fault });
        }
        // The versions of the log grow.
        let later = world.log.partition_point(|change| change.version <= self.at);
        let next = world.log.iter().skip(later).find(|change| change.source == self.source);
        let Some(change) = next else { return Next::Wait };
        self.at = change.version;
        let line = json!({"type": change.kind, "object": change.object});
        Next::Part(Ok(Bytes::from(format!("{line}\n"))))
    }
}
