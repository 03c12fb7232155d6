//! Requests to the API servers. Every wait is bounded. After a failure of a connection, of credentials or of a server,
//! the next request uses a new client. A failure status for one resource is no failure of the server.

pub mod endpoints;
mod failure;
pub mod servers;

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures::future::BoxFuture;
use http::{Method, Request, Response, StatusCode, Uri, header};
use http_body_util::BodyExt as _;
use kube_client::{Client, client::Body};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout};

pub use failure::Failure;

/// Limit for an answer's headers.
const HEADERS: Duration = Duration::from_secs(15);
/// Longest silence of a connection.
pub const SILENCE: Duration = Duration::from_secs(30);
/// Limit for a whole answer, except a watch, and for new credentials.
const WHOLE: Duration = Duration::from_secs(60);
/// Bytes of an error's body.
const MAX_ERROR: usize = 64 << 10;
/// Bytes of the answer to a request for one object.
const MAX_OBJECT: usize = 8 << 20;

/// A server that has answered counts as failed when this many paths have a failure status. A single resource can fail
/// alone, for example without its conversion webhook, and must not move the other resources to another server.
const PATHS: usize = 3;
/// A client of this age is replaced after one failure status: other servers may answer.
const OLD: Duration = Duration::from_secs(300);

/// Creates clients.
pub trait Connect: Send + Sync {
    /// A client with new connections and fresh credentials. `attempt` counts failed clients and selects the server;
    /// tasks that connect concurrently pass the same number.
    fn connect(&self, attempt: usize) -> BoxFuture<'_, Result<Client, Failure>>;
}

struct Current {
    client: Option<Client>,
    number: usize,
    made: Instant,
    has_answered: bool,
    /// Paths whose last answer was a failure status, fewer than [`PATHS`].
    failing: BTreeSet<String>,
}

impl Current {
    fn new(client: Option<Client>, number: usize) -> Self {
        Self { client, number, made: Instant::now(), has_answered: false, failing: BTreeSet::new() }
    }
}

/// The client that all tasks share.
pub struct Api {
    connect: Box<dyn Connect>,
    /// Held to copy or replace the client, never across an await.
    current: Mutex<Current>,
}

/// How a patch is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merge {
    /// Lists are replaced.
    Json,
    /// Lists with a key are merged by it.
    Strategic,
}

/// An answer with an unread body.
#[derive(Debug)]
pub struct Answer {
    /// Status of success.
    pub response: Response<Body>,
    /// Number of the client, for [`Api::failed`].
    pub number: usize,
}

impl Api {
    /// Connects with the first request.
    #[must_use]
    pub fn new(connect: Box<dyn Connect>) -> Self {
        Self { connect, current: Mutex::new(Current::new(None, 0)) }
    }

    /// Sends a request. The answer has a success status and an unread body.
    ///
    /// # Errors
    /// Any other answer, or none within 15 s.
    pub async fn open(&self, request: Request<Body>) -> Result<Answer, Failure> {
        let (client, number) = self.client().await?;
        let (creates, path) = (request.method() == Method::POST, request.uri().path().to_owned());
        let answer = match timeout(HEADERS, client.send(request)).await {
            Ok(answer) => answer.map_err(Failure::connection),
            Err(_) => Err(Failure::Silent(HEADERS)),
        };
        let result = match answer {
            Ok(answer) if answer.status().is_success() => Ok(answer),
            Ok(answer) => Err(refusal(answer).await),
            Err(failure) => Err(failure),
        };
        // An admission webhook can fail a create although the server is healthy.
        let is_of_webhook = |failure: &Failure| creates && failure.code().is_some_and(|code| code >= 500);
        match &result {
            Ok(_) => self.succeeded(number, &path),
            Err(failure) if is_of_webhook(failure) => {}
            Err(failure) => self.failed(number, &path, failure),
        }
        result.map(|response| Answer { response, number })
    }

    /// The body of an answer to a GET, at most `most` bytes.
    ///
    /// # Errors
    /// As [`Self::open`], and for the body.
    pub async fn get(&self, uri: Uri, most: usize) -> Result<Bytes, Failure> {
        self.read(self.open(request(Method::GET, uri, None, Body::empty())?).await?, most).await
    }

    async fn read(&self, answer: Answer, most: usize) -> Result<Bytes, Failure> {
        let body = read(answer.response.into_body(), most).await;
        if let Err(failure) = &body {
            // No status: the path does not matter.
            self.failed(answer.number, "", failure);
        }
        body
    }

    /// Reads an object.
    ///
    /// # Errors
    /// As [`Self::get`], or the object does not decode.
    pub async fn object<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let uri = path.parse::<Uri>().map_err(|error| Failure::request(&error))?;
        let body = self.get(uri, MAX_OBJECT).await?;
        serde_json::from_slice(&body).map_err(Failure::Undecodable)
    }

    /// Patches an object.
    ///
    /// # Errors
    /// As [`Self::open`]; status 409 when the patch names a version that is no longer the object's.
    pub async fn patch(&self, path: &str, merge: Merge, patch: &serde_json::Value) -> Result<(), Failure> {
        let form = match merge {
            Merge::Json => "application/merge-patch+json",
            Merge::Strategic => "application/strategic-merge-patch+json",
        };
        self.write(Method::PATCH, path, form, patch).await
    }

    /// Creates an object.
    ///
    /// # Errors
    /// As [`Self::open`]; status 409 when there is an object with this name.
    pub async fn create(&self, path: &str, object: &serde_json::Value) -> Result<(), Failure> {
        self.write(Method::POST, path, "application/json", object).await
    }

    async fn write(&self, method: Method, path: &str, form: &str, value: &serde_json::Value) -> Result<(), Failure> {
        let uri = path.parse::<Uri>().map_err(|error| Failure::request(&error))?;
        let body = serde_json::to_vec(value).map_err(Failure::Undecodable)?;
        let answer = self.open(request(method, uri, Some(form), Body::from(body))?).await?;
        // A connection is reusable after the end of the body.
        self.read(answer, MAX_OBJECT).await.map(drop)
    }

    async fn client(&self) -> Result<(Client, usize), Failure> {
        let number = match self.current() {
            (Some(client), number) => return Ok((client, number)),
            (None, number) => number,
        };
        // Credentials may be the output of a program.
        let made = timeout(WHOLE, self.connect.connect(number)).await.map_err(|_| Failure::Silent(WHOLE))??;
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.client.is_none() {
            *current = Current::new(Some(made.clone()), current.number.wrapping_add(1));
        }
        Ok((current.client.clone().unwrap_or(made), current.number))
    }

    fn current(&self) -> (Option<Client>, usize) {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        (current.client.clone(), current.number)
    }

    fn succeeded(&self, number: usize, path: &str) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number == number {
            current.has_answered = true;
            current.failing.remove(path);
        }
    }

    /// After a failure of the connection, of credentials or of the server, the next request uses another server and
    /// fresh credentials, unless client `number` is already replaced.
    pub fn failed(&self, number: usize, path: &str, failure: &Failure) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.number != number {
            return;
        }
        let is_useless = match failure.code() {
            Some(500..) => {
                current.failing.insert(path.to_owned());
                !current.has_answered || current.failing.len() >= PATHS || current.made.elapsed() >= OLD
            }
            _ => failure.is_of_connection(),
        };
        if is_useless {
            current.client = None;
        }
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

/// Builds a request.
///
/// # Errors
/// It has no valid URI.
pub fn request(method: Method, uri: Uri, form: Option<&str>, body: Body) -> Result<Request<Body>, Failure> {
    let mut request = Request::builder().method(method).uri(uri).header(header::ACCEPT, "application/json");
    if let Some(form) = form {
        request = request.header(header::CONTENT_TYPE, form);
    }
    request.body(body).map_err(|error| Failure::request(&error))
}

/// The next part of a body; `None` at its end.
///
/// # Errors
/// The connection fails, or is silent for 30 s.
pub async fn part(body: &mut Body) -> Result<Option<Bytes>, Failure> {
    loop {
        let frame = match timeout(SILENCE, body.frame()).await {
            Err(_) => return Err(Failure::Silent(SILENCE)),
            Ok(None) => return Ok(None),
            Ok(Some(frame)) => frame.map_err(Failure::connection)?,
        };
        // Trailers have no data.
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
}

/// Within [`WHOLE`]: a server may send some bytes within each limit.
async fn read(mut body: Body, most: usize) -> Result<Bytes, Failure> {
    let whole = async {
        let mut text = BytesMut::new();
        while let Some(part) = part(&mut body).await? {
            if text.len() + part.len() > most {
                return Err(Failure::TooLarge(most));
            }
            text.extend_from_slice(&part);
        }
        Ok(text.freeze())
    };
    timeout(WHOLE, whole).await.unwrap_or(Err(Failure::Silent(WHOLE)))
}

async fn refusal(answer: Response<Body>) -> Failure {
    let status: StatusCode = answer.status();
    let retry_after = answer.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    // An unreadable body leaves the status as the cause.
    let body = read(answer.into_body(), MAX_ERROR).await.unwrap_or_default();
    Failure::refusal(status.as_u16(), &body, retry_after.map(Duration::from_secs))
}
