//! A deletion record: its rules, its file's name, and reading it from an untrusted file.

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

use super::MAX_RECORD_BYTES;
use wharf_names::{ids::MAX_ENDPOINT_ID, rules};

/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;
/// Longest boot id or nonce, bytes.
const MAX_WORD_BYTES: usize = 64;

/// An endpoint as the mark on its link names it.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct EndpointRef {
    /// Endpoint id, 1 to [`MAX_ENDPOINT_ID`].
    pub id: u16,
    /// Epoch.
    pub epoch: u64,
}

/// A record: this attachment is to be deleted.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub struct Deletion {
    /// [`VERSION`].
    pub version: u32,
    /// Network.
    pub network: String,
    /// Container.
    pub container_id: String,
    /// Interface inside the container.
    pub ifname: String,
    /// The endpoint whose mark was found, when exactly one was. Without it the record is for any endpoint of the
    /// attachment.
    pub endpoint: Option<EndpointRef>,
    /// The boot in which the record was written. The endpoint does not survive a reboot.
    pub boot_id: String,
    /// When the delete was first asked for, milliseconds since the Unix epoch.
    pub written_unix_ms: u64,
    /// A nonce of the agent's self-test of the queue. Such a record requests no delete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<String>,
}

/// Parsed first, so that a record of another version is reported as such and not as malformed.
#[derive(Deserialize)]
struct AnyVersion {
    version: u32,
}

impl Deletion {
    /// Checks the record; the error is the broken rule.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.version != VERSION {
            return Err(format!("version {} is not known here, only {VERSION}", self.version));
        }
        rules::name(&self.network).map_err(|rule| format!("network {:?} {rule}", cut(&self.network)))?;
        rules::name(&self.container_id).map_err(|rule| format!("container id {:?} {rule}", cut(&self.container_id)))?;
        rules::ifname(&self.ifname).map_err(|rule| format!("interface name {:?} {rule}", cut(&self.ifname)))?;
        if let Some(e) = self.endpoint.filter(|e| !(1..=MAX_ENDPOINT_ID).contains(&e.id)) {
            return Err(format!("endpoint id {} must be 1 to {}", e.id, MAX_ENDPOINT_ID));
        }
        word("boot id", &self.boot_id)?;
        self.canary.as_deref().map_or(Ok(()), |nonce| word("canary", nonce))
    }

    /// The name of its file.
    #[must_use]
    pub fn file_name(&self) -> String {
        match &self.canary {
            Some(nonce) => hashed(&["canary", nonce]),
            None => file_name(&self.network, &self.container_id, &self.ifname),
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let malformed = |e: serde_json::Error| format!("it is not a deletion record: {e}");
        let any: AnyVersion = serde_json::from_slice(bytes).map_err(malformed)?;
        if any.version != VERSION {
            return Err(format!("version {} is not known here, only {VERSION}", any.version));
        }
        let deletion: Self = serde_json::from_slice(bytes).map_err(malformed)?;
        deletion.check()?;
        Ok(deletion)
    }
}

/// The name of an attachment's file: of fixed length, whatever the attachment's names are.
pub(super) fn file_name(network: &str, container_id: &str, ifname: &str) -> String {
    hashed(&["attachment", network, container_id, ifname])
}

fn hashed(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        // The length before each part makes the hash input unambiguous.
        hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let mut name = String::with_capacity(69);
    for byte in hash.finalize() {
        // Writing to a String cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
    name + ".json"
}

fn word(what: &str, text: &str) -> Result<(), String> {
    let fits = (1..=MAX_WORD_BYTES).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
    if fits {
        Ok(())
    } else {
        Err(format!("{what} {:?} must be 1 to {MAX_WORD_BYTES} printable ASCII bytes", cut(text)))
    }
}

/// At most 80 characters of hostile text, for a message.
fn cut(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Result of reading a file of the queue.
pub(super) enum Found {
    /// No file of that name.
    Nothing,
    /// Something that cannot be used.
    Unusable { why: String, modified_unix_ms: u64 },
    /// A record of that name.
    Record(Deletion),
}

/// Reads a file of the queue. It never follows a symbolic link, blocks on a pipe, or reads more than a record may
/// have.
pub(super) fn read(path: &Path, name: &str) -> Found {
    // The type is checked before the open, because opening a device may have side effects.
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Found::Nothing,
        Err(e) => return Found::Unusable { why: format!("it cannot be looked at: {e}"), modified_unix_ms: 0 },
    };
    let unusable = |why| Found::Unusable { why, modified_unix_ms: modified_unix_ms(&metadata) };
    if !metadata.is_file() {
        return unusable("it is not a regular file".into());
    }
    let bytes = match read_bytes(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Found::Nothing,
        Err(e) => return unusable(format!("it cannot be read: {e}")),
    };
    if u64::try_from(bytes.len()).unwrap_or(u64::MAX) > MAX_RECORD_BYTES {
        return unusable(format!("it is longer than {MAX_RECORD_BYTES} bytes"));
    }
    match Deletion::parse(&bytes) {
        Ok(deletion) if deletion.file_name() == name => Found::Record(deletion),
        Ok(_) => unusable("its name is another record's".into()),
        Err(why) => unusable(why),
    }
}

/// Reads at most one byte more than the longest record.
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
