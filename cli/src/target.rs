//! Endpoint names that the agent resolves.

use std::str::FromStr;

/// Bytes; the agent's limit.
const MAX: usize = 600;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target(String);

impl Target {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a name has 1 to {MAX} bytes, without blanks and control characters")]
pub(crate) struct BadName;

impl FromStr for Target {
    type Err = BadName;

    fn from_str(text: &str) -> Result<Self, BadName> {
        if text.is_empty() || text.len() > MAX || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(BadName);
        }
        Ok(Self(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_word() {
        for good in ["7", "10.88.0.7", "fd00::7", "3f9c51aa/eth1", "pod-name:default/web", "wh00070000002a", "web-1"] {
            assert_eq!(good.parse::<Target>().as_ref().map(Target::as_str), Ok(good));
        }
        for bad in ["", "a b", "a\x1b[2J", "a\n", &"a".repeat(601)] {
            assert!(bad.parse::<Target>().is_err(), "{bad:?}");
        }
    }
}
