//! Streams of events.

use std::time::Duration;

use http::Method;
use kube_client::client::Body;
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::{Instant, timeout_at};

use super::{Event, Stop, Watcher, lines::Lines, states::State};
use crate::{
    api::{Failure, part, request},
    objects::Identity,
    source::Served,
};

/// Seconds after which the server ends a watch. This detects dead connections: bookmarks come once a minute, and a
/// quiet watch has no other sign of life.
const SECONDS: std::ops::RangeInclusive<u64> = 20..=25;
/// Added for a server that does not end the watch.
const GRACE: Duration = Duration::from_secs(5);
/// A stream that ends earlier than requested by this time is broken: a stopping server or a proxy ends it.
const EARLY: Duration = Duration::from_secs(1);
/// Bytes of an event.
const MAX_EVENT: usize = 32 << 20;

#[derive(Debug, Deserialize)]
struct Envelope<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Debug, Deserialize)]
struct Bookmark {
    metadata: BookmarkMetadata,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct BookmarkMetadata {
    resource_version: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Version(String);

impl Version {
    /// # Errors
    /// A watch from it would begin at any version.
    pub(super) fn new(version: String) -> Result<Self, Failure> {
        if version.is_empty() || version == "0" || !version.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(Failure::Request(format!("the list has the resourceVersion {version:?}")));
        }
        Ok(Self(version))
    }

    /// Decimal versions must not decrease; others are not compared.
    fn advance(&mut self, next: String) -> Result<(), Failure> {
        if let (Ok(before), Ok(now)) = (self.0.parse::<u64>(), next.parse::<u64>())
            && now < before
        {
            return Err(Failure::Rewound { before, now });
        }
        *self = Self::new(next)?;
        Ok(())
    }
}

impl Watcher {
    /// Watches until the server ends the stream as requested. `version` follows the events; `accepted` is the time of
    /// the answer's headers.
    ///
    /// # Errors
    /// Any other end of the stream.
    pub(super) async fn watch(
        &self,
        served: &Served,
        version: &mut Version,
        accepted: &mut Option<Instant>,
    ) -> Result<(), Stop> {
        let seconds = rand::random_range(SECONDS);
        let query = format!(
            "{}watch=true&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={seconds}",
            self.reader.source.selector(),
            version.0
        );
        let uri = served.uri(&query).map_err(|error| Failure::Request(error.to_string()))?;
        let answer = self.api.open(request(Method::GET, uri, None, Body::empty())?).await?;
        self.set_state(State::Watching);
        let number = answer.number;
        let began = Instant::now();
        *accepted = Some(began);
        let limit = Duration::from_secs(seconds) + GRACE;
        let read = self.events(answer.response.into_body(), served, version);
        match timeout_at(began + limit, read).await {
            Err(_) => Err(self.broken(number, served, Failure::Silent(limit))),
            Ok(Ok(())) if began.elapsed() + EARLY < Duration::from_secs(seconds) => {
                Err(self.broken(number, served, Failure::Connection("the server ends the watch early".to_owned())))
            }
            Ok(Err(Stop::Failed(failure))) if failure.is_of_connection() => Err(self.broken(number, served, failure)),
            Ok(result) => result,
        }
    }

    fn broken(&self, number: usize, served: &Served, failure: Failure) -> Stop {
        self.api.failed(number, &served.path, &failure);
        Stop::Failed(failure)
    }

    async fn events(&self, mut body: Body, served: &Served, version: &mut Version) -> Result<(), Stop> {
        let mut lines = Lines::new(MAX_EVENT);
        while let Some(part) = part(&mut body).await? {
            lines.push(&part);
            while let Some(line) = lines.line().map_err(|_| Failure::TooLarge(MAX_EVENT))? {
                self.event(&line, served, version).await?;
            }
            self.metrics.contact(self.reader.source);
        }
        if lines.is_cut() {
            return Err(Failure::Connection("the watch ends within an event".to_owned()).into());
        }
        Ok(())
    }

    async fn event(&self, line: &[u8], served: &Served, version: &mut Version) -> Result<(), Stop> {
        let Envelope { kind, object } = serde_json::from_slice(line).map_err(Failure::Undecodable)?;
        let text = object.get();
        match kind.as_str() {
            "BOOKMARK" => {
                let bookmark: Bookmark = serde_json::from_str(text).map_err(Failure::Undecodable)?;
                version.advance(bookmark.metadata.resource_version)?;
                Ok(())
            }
            "ADDED" | "MODIFIED" | "DELETED" => {
                let identity: Identity = serde_json::from_str(text).map_err(Failure::Undecodable)?;
                let object_key = identity.key();
                // A watch that is cancelled during the send continues before the event.
                let mut next = version.clone();
                next.advance(identity.metadata.resource_version)?;
                self.metrics.event(self.reader.source);
                if kind == "DELETED" {
                    self.send(Event::Gone { object: object_key, uid: identity.metadata.uid }).await?;
                } else {
                    self.object(served, object).await?;
                }
                *version = next;
                Ok(())
            }
            "ERROR" => Err(Failure::refusal(0, text.as_bytes(), None).into()),
            other => Err(Failure::Request(format!("an event of the unknown type {other:?}")).into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_grows_and_is_never_any() {
        for bad in ["", "0", "1&x=y"] {
            assert!(Version::new(bad.into()).is_err(), "{bad}");
        }
        let mut version = Version::new("9".into()).expect("a version");
        version.advance("9".into()).expect("a bookmark");
        version.advance("10".into()).expect("greater, though not as text");
        assert!(matches!(version.advance("9".into()), Err(Failure::Rewound { before: 10, now: 9 })));
    }
}
