//! The plainest HTTP client there is, for requests that a well-behaved client would not send.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// An HTTP answer.
#[derive(Debug, Clone)]
pub struct Response {
    /// Status code.
    pub status: u16,
    /// Header lines, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body, decoded when it came in chunks.
    pub body: Vec<u8>,
}

impl Response {
    /// The body as JSON.
    ///
    /// # Errors
    /// When it is not JSON.
    pub fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("not JSON: {:?}", self.text()))
    }

    /// The body as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The stable code of an error answer.
    ///
    /// # Errors
    /// When the body is not an error answer.
    pub fn code(&self) -> Result<String> {
        let code = self.json()?.get("code").and_then(Value::as_str).map(str::to_owned);
        code.with_context(|| format!("no error code in {:?}", self.text()))
    }

    /// A header's value.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

/// Sends one request, with `Connection: close`, and reads the whole answer.
///
/// # Errors
/// When there is no answer, or it is not HTTP.
pub fn request(socket: &Path, method: &str, target: &str, body: Option<&str>) -> Result<Response> {
    let mut head = format!("{method} {target} HTTP/1.1\r\nHost: wharf\r\nConnection: close\r\n");
    if let Some(body) = body {
        head += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    }
    raw(socket, format!("{head}\r\n{}", body.unwrap_or_default()).as_bytes())
        .with_context(|| format!("{method} {target}"))
}

/// Sends bytes as they are and reads the answer to its end.
///
/// # Errors
/// When there is no answer, or it is not HTTP.
pub fn raw(socket: &Path, bytes: &[u8]) -> Result<Response> {
    let mut stream = UnixStream::connect(socket).with_context(|| format!("connect {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(40))).context("set a time limit")?;
    // A server that refuses early closes before it has read everything; its answer is still to be read.
    if let Err(e) = stream.write_all(bytes)
        && e.kind() != std::io::ErrorKind::BrokenPipe
    {
        return Err(e).context("send the request");
    }
    let mut answer = Vec::new();
    if let Err(e) = stream.read_to_end(&mut answer)
        && (answer.is_empty() || e.kind() != std::io::ErrorKind::ConnectionReset)
    {
        return Err(e).context("read the answer");
    }
    parse(&answer)
}

fn parse(answer: &[u8]) -> Result<Response> {
    let Some(end) = answer.windows(4).position(|w| w == b"\r\n\r\n") else {
        bail!("not an HTTP answer: {:?}", String::from_utf8_lossy(answer));
    };
    let (head, rest) = answer.split_at(end);
    let head = String::from_utf8_lossy(head);
    let mut lines = head.lines();
    let status = lines
        .next()
        .and_then(|l| l.split(' ').nth(1))
        .and_then(|s| s.parse().ok())
        .with_context(|| format!("no status in {head:?}"))?;
    let headers: Vec<(String, String)> =
        lines.filter_map(|l| l.split_once(':')).map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned())).collect();
    let body = rest.get(4..).unwrap_or_default();
    let chunked = headers.iter().any(|(n, v)| n == "transfer-encoding" && v == "chunked");
    let body = if chunked { unchunk(body)? } else { body.to_vec() };
    Ok(Response { status, headers, body })
}

fn unchunk(mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line_end = rest.windows(2).position(|w| w == b"\r\n").context("a chunk without its length")?;
        let (line, after) = rest.split_at(line_end);
        let size = usize::from_str_radix(String::from_utf8_lossy(line).trim(), 16).context("a chunk's length")?;
        if size == 0 {
            return Ok(body);
        }
        body.extend_from_slice(after.get(2..2 + size).context("a chunk cut short")?);
        rest = after.get(size + 4..).context("a chunk cut short")?;
    }
}
