//! Lists in pages.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Event, Stop, Watcher, stream::Version};
use crate::{api::Failure, objects::Identity, source::Served};

const PAGE: u32 = 500;
/// Bytes. A larger page is requested again with fewer objects.
const MAX_PAGE: usize = 8 << 20;
/// After an expired token of the next page.
const MAX_RESTARTS: u32 = 3;

#[derive(Debug, Deserialize)]
struct Page<'a> {
    metadata: PageMetadata,
    /// Absent or null: no objects.
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    token: Option<String>,
}

impl Watcher {
    /// Returns the resource version of the first page, and the number of objects. Later events may repeat objects of
    /// later pages. `has_begun` is set before the first object is sent.
    pub(super) async fn list(&self, served: &Served, has_begun: &mut bool) -> Result<(Version, u32), Stop> {
        let mut restarts = 0;
        loop {
            match self.pages(served, has_begun).await {
                Err(Stop::Failed(Failure::Refused { code: 410, .. })) if restarts < MAX_RESTARTS => restarts += 1,
                result => return result,
            }
        }
    }

    async fn pages(&self, served: &Served, has_begun: &mut bool) -> Result<(Version, u32), Stop> {
        let (mut limit, mut token, mut first, mut objects) = (PAGE, None::<String>, None, 0_u32);
        loop {
            let mut query = format!("{}limit={limit}", self.reader.source.selector());
            if let Some(token) = &token {
                query.push_str("&continue=");
                query.push_str(&escaped(token));
            }
            let uri = served.uri(&query).map_err(|error| Failure::Request(error.to_string()))?;
            let body = match self.api.get(uri, self.max_page(limit)).await {
                Err(Failure::TooLarge(_)) if limit > 1 => {
                    limit /= 4;
                    limit = limit.max(1);
                    continue;
                }
                body => body?,
            };
            let page: Page<'_> = serde_json::from_slice(&body).map_err(Failure::Undecodable)?;
            let items = page.items.unwrap_or_default();
            let token_of_next = page.metadata.token.filter(|token| !token.is_empty());
            if items.is_empty() && token_of_next.is_some() {
                return Err(Failure::Request("a page without objects is not the last one".to_owned()).into());
            }
            if first.is_none() {
                *has_begun = true;
                self.send(Event::Begin).await?;
            }
            for object in items {
                objects = objects.saturating_add(1);
                self.object(served, object).await?;
            }
            let version = first.take().map_or_else(|| Version::new(page.metadata.resource_version), Ok)?;
            match token_of_next {
                Some(next) => (token, first) = (Some(next), Some(version)),
                None => {
                    self.send(Event::Complete).await?;
                    return Ok((version, objects));
                }
            }
        }
    }

    /// A single object has no smaller page.
    const fn max_page(&self, limit: u32) -> usize {
        if limit == 1 { 4 * MAX_PAGE } else { MAX_PAGE }
    }

    /// An object of a list or watch. An object that does not decode keeps its earlier row; without a name it is
    /// skipped.
    pub(super) async fn object(&self, served: &Served, object: &RawValue) -> Result<(), Stop> {
        match self.reader.read(&served.api_version, object) {
            Ok(defined) => self.send(Event::Put(defined)).await,
            Err(why) => match serde_json::from_str::<Identity>(object.get()) {
                Ok(identity) => {
                    let object = identity.key();
                    self.report_unusable(&object, &why);
                    self.send(Event::Keep { object, uid: identity.metadata.uid }).await
                }
                Err(_) => {
                    self.report_unusable("", &why);
                    Ok(())
                }
            },
        }
    }
}

/// Escapes all but the unreserved characters of a URI.
fn escaped(token: &str) -> String {
    let mut text = String::with_capacity(token.len());
    for byte in token.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_escaped() {
        assert_eq!(escaped("eyJ2IjoibWV0YSJ9+/="), "eyJ2IjoibWV0YSJ9%2B%2F%3D");
    }
}
