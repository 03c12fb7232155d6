//! Names of sandboxes.

use std::{fmt, net::IpAddr, path::Path, str::FromStr};

use serde::{Deserialize, Serialize};
use wharf_names::rules;

/// Bytes, far below the limits of file names and container ids.
const MAX_BYTES: usize = 63;

/// Name of a sandbox and its files.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxName(String);

impl SandboxName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether other commands would read the name as an endpoint's number or address.
    pub(crate) fn names_an_endpoint(&self) -> bool {
        self.0.bytes().all(|b| b.is_ascii_digit()) || self.0.parse::<IpAddr>().is_ok()
    }
}

impl FromStr for SandboxName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        rules::name(text).map_err(|rule| format!("a sandbox's name {rule}"))?;
        if text.len() > MAX_BYTES {
            return Err(format!("a sandbox's name must be at most {MAX_BYTES} bytes"));
        }
        Ok(Self(text.to_owned()))
    }
}

impl TryFrom<String> for SandboxName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<SandboxName> for String {
    fn from(name: SandboxName) -> Self {
        name.0
    }
}

impl AsRef<Path> for SandboxName {
    fn as_ref(&self) -> &Path {
        self.0.as_ref()
    }
}

impl fmt::Display for SandboxName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_addresses_name_endpoints() {
        for (name, expected) in [("3", true), ("10.87.0.7", true), ("web", false), ("3a", false), ("10.87", false)] {
            assert_eq!(name.parse::<SandboxName>().unwrap().names_an_endpoint(), expected, "{name}");
        }
    }

    #[test]
    fn no_name_leads_out_of_its_directory() {
        for bad in ["", ".", "..", ".a", "a/b", "../a", "a b", "a\n", "-a", &"a".repeat(64)] {
            assert!(bad.parse::<SandboxName>().is_err(), "{bad:?}");
        }
        for good in ["a", "web-1", "a.json", "A_b", &"a".repeat(63)] {
            assert!(good.parse::<SandboxName>().is_ok(), "{good:?}");
        }
    }
}
