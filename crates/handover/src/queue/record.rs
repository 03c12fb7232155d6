//! A deletion record.

use std::{
    fmt::Write as _,
    fs::{self, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::UNIX_EPOCH,
};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{MAX_RECORD_BYTES, Unusable};
use wharf_names::{ids::MAX_ENDPOINT_ID, rules};

/// Written version; no other is read.
pub const VERSION: u32 = 1;

/// An endpoint, as the mark of its link names it.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct EndpointRef {
    /// 1 to [`MAX_ENDPOINT_ID`].
    pub id: u16,
    pub epoch: u64,
}

/// Request to delete an attachment.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Deletion {
    pub version: u32,
    pub network: String,
    pub container_id: String,
    /// Interface inside the container.
    pub ifname: String,
    /// Endpoint of the only mark found. Without it, any endpoint of the attachment.
    pub endpoint: Option<EndpointRef>,
    /// Boot of the record: endpoints do not survive a reboot.
    pub boot_id: String,
    /// Unix milliseconds of the first delete request.
    pub written_unix_ms: u64,
    /// Self-test nonce; such a record requests no delete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<String>,
}

/// Parsed first, for [`Unusable::Version`].
#[derive(Deserialize)]
struct AnyVersion {
    version: u32,
}

impl Deletion {
    pub(super) fn check(&self) -> Result<(), Unusable> {
        if self.version != VERSION {
            return Err(Unusable::Version(self.version));
        }
        fits("network", &self.network, rules::name)?;
        fits("container id", &self.container_id, rules::name)?;
        fits("interface name", &self.ifname, rules::ifname)?;
        if let Some(e) = self.endpoint.filter(|e| !(1..=MAX_ENDPOINT_ID).contains(&e.id)) {
            return Err(Unusable::EndpointId(e.id));
        }
        fits("boot id", &self.boot_id, word)?;
        self.canary.as_deref().map_or(Ok(()), |nonce| fits("canary", nonce, word))
    }

    /// File name of the record.
    #[must_use]
    pub fn file_name(&self) -> String {
        match &self.canary {
            Some(nonce) => hashed(&["canary", nonce]),
            None => file_name(&self.network, &self.container_id, &self.ifname),
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Unusable> {
        let malformed = |e| Unusable::Json("it is not a deletion record", e);
        let any: AnyVersion = serde_json::from_slice(bytes).map_err(malformed)?;
        if any.version != VERSION {
            return Err(Unusable::Version(any.version));
        }
        let deletion: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        deletion.check()?;
        Ok(deletion)
    }
}

pub(super) fn file_name(network: &str, container_id: &str, ifname: &str) -> String {
    hashed(&["attachment", network, container_id, ifname])
}

fn hashed(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // The lengths make the hash input unambiguous.
        hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let mut name = String::with_capacity(69);
    for byte in hash.finalize() {
        let _ = write!(name, "{byte:02x}");
    }
    name + ".json"
}

fn word(text: &str) -> Result<(), &'static str> {
    let fits = (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    if fits { Ok(()) } else { Err("must be 1 to 64 printable ASCII bytes") }
}

/// Quotes at most 80 characters: the text may be hostile.
fn fits(field: &'static str, text: &str, rule: impl Fn(&str) -> Result<(), &'static str>) -> Result<(), Unusable> {
    rule(text).map_err(|rule| Unusable::Field(field, text.chars().take(80).collect(), rule))
}

pub(crate) enum Found<T> {
    Nothing,
    Unusable { why: Unusable, modified_unix_ms: u64 },
    Record(T),
}

/// Name and record must match.
pub(super) fn read_deletion(path: &Path, name: &str) -> Found<Deletion> {
    read(path, |bytes| match Deletion::parse(bytes) {
        Ok(deletion) if deletion.file_name() != name => Err(Unusable::OtherName),
        parsed => parsed,
    })
}

/// Never follows a link, blocks on a pipe, or reads more than a record.
pub(crate) fn read<T>(path: &Path, parse: impl FnOnce(&[u8]) -> Result<T, Unusable>) -> Found<T> {
    // Before the open: opening a device may have side effects.
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Found::Nothing,
        Err(e) => return Found::Unusable { why: Unusable::Io("it cannot be looked at", e), modified_unix_ms: 0 },
    };
    let unusable = |why| Found::Unusable { why, modified_unix_ms: modified_unix_ms(&metadata) };
    if !metadata.is_file() {
        return unusable(Unusable::NotAFile);
    }
    let bytes = match read_bytes(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Found::Nothing,
        Err(e) => return unusable(Unusable::Io("it cannot be read", e)),
    };
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_RECORD_BYTES {
        return unusable(Unusable::TooLong);
    }
    match parse(&bytes) {
        Ok(record) => Found::Record(record),
        Err(why) => unusable(why),
    }
}

fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_RECORD_BYTES.saturating_add(1)).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn modified_unix_ms(metadata: &Metadata) -> u64 {
    let since = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
