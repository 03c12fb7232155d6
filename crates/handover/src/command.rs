//! A CNI command, for request headers and [reports](crate::report).

use std::{fmt::Write as _, time::Duration};

use serde::{Deserialize, Serialize};
use wharf_names::rules;

use crate::queue::Unusable;

/// Bytes of pod name or namespace.
pub const MAX_POD_BYTES: usize = 253;
/// Bytes, more than twice a header.
pub const MAX_HEADER_BYTES: usize = 4096;

/// Counted commands; STATUS and VERSION concern no container.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verb {
    Add,
    Del,
    Check,
    Gc,
}

impl Verb {
    /// The value of `CNI_COMMAND`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
        }
    }

    /// Inverse of [`Self::as_str`].
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Add, Self::Del, Self::Check, Self::Gc].into_iter().find(|verb| verb.as_str() == text)
    }
}

/// A run of the shim; absent or unreadable texts are empty.
#[derive(Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Random; links requests with their report.
    pub id: u64,
    pub verb: Verb,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub network: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub container_id: String,
    /// Interface inside the container.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ifname: String,
    /// `K8S_POD_NAME`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod_name: String,
    /// `K8S_POD_NAMESPACE`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod_namespace: String,
    /// Another plugin made the interface, as far as the shim knows; for a DEL, the agent uses its record.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub chained: bool,
    /// Program that ran the plugin.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub runtime: String,
}

#[derive(Serialize, Deserialize)]
struct Header {
    command: Command,
    age_us: u64,
}

impl Command {
    /// ASCII header value. `age`: the shim's run time.
    #[must_use]
    pub fn to_header(&self, age: Duration) -> String {
        let age_us = u64::try_from(age.as_micros()).unwrap_or(u64::MAX);
        // Never fails; without a header, commands are not counted.
        let json = serde_json::to_string(&Header { command: self.clone(), age_us }).unwrap_or_default();
        let mut ascii = String::with_capacity(json.len());
        for c in json.chars() {
            if matches!(c, ' '..='~') {
                ascii.push(c);
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(ascii, "\\u{unit:04x}");
                }
            }
        }
        ascii
    }

    /// Parses an untrusted header: command, and the shim's run time.
    ///
    /// # Errors
    /// The header is invalid, or a name in it breaks a rule.
    pub fn of_header(bytes: &[u8]) -> Result<(Self, Duration), Unusable> {
        if bytes.len() > MAX_HEADER_BYTES {
            return Err(Unusable::TooLong);
        }
        let Header { command, age_us } =
            serde_json::from_slice(bytes).map_err(|e| Unusable::Json("it names no CNI command", e))?;
        command.check()?;
        Ok((command, Duration::from_micros(age_us)))
    }

    pub(crate) fn check(&self) -> Result<(), Unusable> {
        let pod = |text: &str| if text.len() <= MAX_POD_BYTES { Ok(()) } else { Err("must be at most 253 bytes") };
        fits("network", &self.network, rules::name)?;
        fits("container id", &self.container_id, rules::name)?;
        fits("interface name", &self.ifname, rules::ifname)?;
        fits("runtime", &self.runtime, rules::program)?;
        fits("pod name", &self.pod_name, pod)?;
        fits("pod namespace", &self.pod_namespace, pod)
    }
}

/// May be empty. Quotes at most 80 characters of hostile text.
fn fits(field: &'static str, text: &str, rule: impl Fn(&str) -> Result<(), &'static str>) -> Result<(), Unusable> {
    if text.is_empty() {
        return Ok(());
    }
    rule(text).map_err(|rule| Unusable::Field(field, text.chars().take(80).collect(), rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command() -> Command {
        Command {
            id: u64::MAX,
            verb: Verb::Add,
            network: "net".into(),
            container_id: "c1".into(),
            ifname: "eth\u{e9}0".into(),
            pod_name: "web\u{1f6a2}-0\u{7f}".into(),
            pod_namespace: String::new(),
            chained: false,
            runtime: "crio".into(),
        }
    }

    #[test]
    fn a_header_is_printable_and_read_as_it_was_written() {
        let header = command().to_header(Duration::from_micros(1_250));
        assert!(header.bytes().all(|b| (b' '..=b'~').contains(&b)), "{header}");
        assert_eq!(Command::of_header(header.as_bytes()).unwrap(), (command(), Duration::from_micros(1_250)));
    }

    #[test]
    fn a_header_of_longest_names_is_shorter_than_what_is_read() {
        let long = |n: usize| "x".repeat(n);
        let command = Command {
            network: long(253),
            container_id: long(253),
            ifname: "\u{7f}".repeat(15),
            pod_name: long(253),
            pod_namespace: long(253),
            runtime: long(15),
            ..command()
        };
        assert!(command.to_header(Duration::MAX).len() <= MAX_HEADER_BYTES / 2);
    }

    #[test]
    fn hostile_headers_are_refused_in_few_words() {
        let too_long = "x".repeat(1_000);
        for bytes in [
            String::new(),
            "{}".into(),
            "\u{fffd}".into(),
            r#"{"command":{"id":1,"verb":"RM"},"age_us":1}"#.into(),
            r#"{"command":{"id":-1,"verb":"ADD"},"age_us":1}"#.into(),
            r#"{"command":{"id":1,"verb":"ADD","network":"a/b"},"age_us":1}"#.into(),
            r#"{"command":{"id":1,"verb":"ADD","runtime":"a/b"},"age_us":1}"#.into(),
            format!(r#"{{"command":{{"id":1,"verb":"ADD","pod_name":"{too_long}"}},"age_us":1}}"#),
            " ".repeat(MAX_HEADER_BYTES + 1),
        ] {
            let refusal = Command::of_header(bytes.as_bytes()).expect_err(&bytes).to_string();
            assert!(refusal.len() < 400, "{refusal}");
        }
    }
}
