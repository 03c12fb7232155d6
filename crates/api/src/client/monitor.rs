//! The stream of `GET /v1/monitor`.

use bytes::{Buf, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::{
    Call, Client, ClientError,
    exchange::{Driver, broken, driven},
};
use crate::MonitorEvent;

/// Longest line, bytes; an event has a few hundred.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Longest error answer, bytes.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// A stream of events; dropping it closes the connection.
pub struct Monitor {
    call: Call,
    driver: Option<Driver>,
    body: Incoming,
    /// Unreturned bytes, including an incomplete last line.
    pending: BytesMut,
    /// Length of the prefix of `pending` without a newline.
    searched: usize,
}

impl Monitor {
    pub(super) async fn open(client: &Client, call: Call) -> Result<Self, ClientError> {
        client
            .limited(&call, async {
                let (response, driver) = client.begin(&call, None).await?;
                let status = response.status();
                let mut monitor = Self {
                    call: call.clone(),
                    driver,
                    body: response.into_body(),
                    pending: BytesMut::new(),
                    searched: 0,
                };
                if status.is_success() {
                    return Ok(monitor);
                }
                while monitor.pending.len() < MAX_ERROR_BYTES && monitor.fill().await? {}
                Err(call.failed(status, &monitor.pending))
            })
            .await
    }

    /// The next event; `None` at the stream's end. Cancel-safe.
    ///
    /// # Errors
    /// The connection ended within a line, or a line is not an event. Do not call again after an error.
    pub async fn next(&mut self) -> Result<Option<MonitorEvent>, ClientError> {
        loop {
            if let Some(line) = self.take_line() {
                if line.iter().all(u8::is_ascii_whitespace) {
                    // An empty line is the agent's probe for a closed connection.
                    continue;
                }
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(|e| self.call.protocol(format!("a line is not an event: {e}")));
            }
            if self.pending.len() > MAX_LINE_BYTES {
                return Err(self.call.protocol(format!("a line is longer than {MAX_LINE_BYTES} bytes")));
            }
            if !self.fill().await? {
                if self.pending.is_empty() {
                    return Ok(None);
                }
                return Err(ClientError::Closed {
                    operation: self.call.operation(),
                    reason: "in the middle of an event".into(),
                });
            }
        }
    }

    fn take_line(&mut self) -> Option<BytesMut> {
        let fresh = self.pending.get(self.searched..)?;
        if let Some(at) = fresh.iter().position(|b| *b == b'\n') {
            let line = self.pending.split_to(self.searched.saturating_add(at));
            self.pending.advance(1);
            self.searched = 0;
            Some(line)
        } else {
            self.searched = self.pending.len();
            None
        }
    }

    /// Reads more bytes; false at the end of the stream.
    async fn fill(&mut self) -> Result<bool, ClientError> {
        let frame = driven(&mut self.driver, self.body.frame()).await;
        match frame {
            None => Ok(false),
            Some(Err(e)) => Err(broken(&self.call, &e)),
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    self.pending.extend_from_slice(&data);
                }
                Ok(true)
            }
        }
    }
}

impl std::fmt::Debug for Monitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Monitor")
            .field("call", &self.call)
            .field("pending", &self.pending.len())
            .finish_non_exhaustive()
    }
}
