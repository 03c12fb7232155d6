//! DNS names in rules.

use std::{borrow::Cow, fmt, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Without the trailing dot, bytes (RFC 1035, section 2.3.4).
pub const MAX_NAME: usize = 253;
/// Maximum characters of a refused pattern in its error.
const SHOWN: usize = 64;
/// Bytes (RFC 1035, section 2.3.4).
const MAX_LABEL: usize = 63;
const EVERY_NAME: &str = "*";
const BELOW: &str = "**.";

/// A DNS name or pattern (Cilium's `matchPattern`), lower case, without a trailing dot.
///
/// - `*` matches zero or more characters of a label: letters, digits, `-` and `_`.
/// - `*` alone matches every name, including the root.
/// - A leading `**.` matches one or more labels.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamePattern(Arc<str>);

/// Why a text is neither name nor pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Trailing dot excluded.
    #[error("is longer than {MAX_NAME} bytes")]
    TooLong,
    /// An empty or long label.
    #[error("has a label that is empty or longer than {MAX_LABEL} bytes")]
    Label,
    /// Other than letter, digit, `-`, `_`, dot.
    #[error("has a character that is not of a name")]
    Character,
    /// `*` in a single name.
    #[error("has a *, which only a pattern may have")]
    NoPattern,
    /// `*.`, or adjacent stars other than a leading `**.`.
    #[error("has stars that stand for nothing")]
    Stars,
}

impl Malformed {
    /// Correction.
    #[must_use]
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::TooLong => "shorten it: no name is longer",
            Self::Label => "write labels of 1 to 63 characters with a dot between them",
            Self::Character => "write letters, digits, - and _, and other scripts as DNS has them (xn--...)",
            Self::NoPattern => "write it as matchPattern",
            Self::Stars => {
                "write * for characters of a label, **. at the beginning for all subdomains, * for every name"
            }
        }
    }
}

impl NamePattern {
    /// Parses a name, in any case, with or without a trailing dot.
    ///
    /// # Errors
    /// The text is not a DNS name.
    pub fn name(text: &str) -> Result<Self, Malformed> {
        if text.contains('*') { Err(Malformed::NoPattern) } else { Self::pattern(text) }
    }

    /// Parses a name or pattern.
    ///
    /// # Errors
    /// The text is not a pattern.
    pub fn pattern(text: &str) -> Result<Self, Malformed> {
        if text == EVERY_NAME {
            return Ok(Self(text.into()));
        }
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.len() > MAX_NAME {
            return Err(Malformed::TooLong);
        }
        let name = text.strip_prefix(BELOW).unwrap_or(text);
        // `*.` could mean one label or every name.
        if name == EVERY_NAME && text == name || name.contains("**") {
            return Err(Malformed::Stars);
        }
        for label in name.split('.') {
            if !label.bytes().all(|b| is_inner(b) || b == b'*') {
                return Err(Malformed::Character);
            }
            if label.is_empty() || label.len() > MAX_LABEL {
                return Err(Malformed::Label);
            }
        }
        Ok(Self(text.to_ascii_lowercase().into()))
    }

    /// Whether a name, as for [`Self::name`], matches. Time: product of both lengths.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        if self.0.as_ref() == EVERY_NAME {
            return true;
        }
        let name = name.strip_suffix('.').unwrap_or(name);
        let upper = name.bytes().any(|b| b.is_ascii_uppercase());
        let name = if upper { Cow::Owned(name.to_ascii_lowercase()) } else { Cow::Borrowed(name) };
        let (own, below) = match self.0.strip_prefix(BELOW) {
            Some(own) => (own, true),
            None => (&*self.0, false),
        };
        let mut labels = name.rsplit('.');
        let fit = own.rsplit('.').all(|pattern| labels.next().is_some_and(|label| fits(pattern, label)));
        let mut more = labels.peekable();
        fit && more.peek().is_some() == below && more.all(is_label)
    }

    /// Whether it has no stars.
    #[must_use]
    pub fn is_name(&self) -> bool {
        !self.0.contains('*')
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

const fn is_inner(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

pub(crate) fn is_label(label: &str) -> bool {
    (1..=MAX_LABEL).contains(&label.len()) && label.bytes().all(is_inner)
}

/// Leftmost matches leave most for the rest.
fn fits(pattern: &str, label: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == label };
    let (between, last) = rest.rsplit_once('*').unwrap_or(("", rest));
    let inner = label.strip_prefix(first).and_then(|rest| rest.strip_suffix(last));
    let Some(mut inner) = inner.filter(|_| is_label(label)) else { return false };
    between.split('*').all(|part| {
        let Some((_, rest)) = inner.split_once(part) else { return false };
        inner = rest;
        true
    })
}

impl fmt::Display for NamePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for NamePattern {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for NamePattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let refused = |malformed: Malformed| {
            let shown: String = text.chars().take(SHOWN).collect();
            de::Error::custom(format_args!("the name pattern {shown:?} {malformed}; {}", malformed.remedy()))
        };
        Self::pattern(&text).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matched<'a>(pattern: &str, names: &[&'a str]) -> Vec<&'a str> {
        let pattern = NamePattern::pattern(pattern).expect("a pattern");
        names.iter().copied().filter(|name| pattern.matches(name)).collect()
    }

    #[test]
    fn a_name_is_itself_in_any_case_and_with_or_without_a_last_dot() {
        let names = ["api.example.com", "API.Example.com.", "example.com", "xapi.example.com", "api.example.com..", ""];
        for pattern in ["api.example.com", "Api.Example.Com."] {
            assert_eq!(matched(pattern, &names), ["api.example.com", "API.Example.com."], "{pattern}");
            assert_eq!(NamePattern::name(pattern), NamePattern::pattern(pattern));
            assert_eq!(NamePattern::name(pattern).expect("a name").to_string(), "api.example.com");
        }
    }

    #[test]
    fn a_star_is_characters_of_one_label() {
        let names =
            ["example.com", "a.example.com", "A_-9.example.com", "a.b.example.com", ".example.com", "a.example.org"];
        assert_eq!(matched("*.example.com", &names), ["a.example.com", "A_-9.example.com"]);
        assert_eq!(
            matched("*example.com", &["example.com", "myexample.com", "my.example.com"]),
            ["example.com", "myexample.com"]
        );
        assert_eq!(matched("sub*.com", &["sub.com", "sub1.com", "sub.a.com", "asub.com"]), ["sub.com", "sub1.com"]);
        assert_eq!(matched("*.*.com", &["a.com", "a.b.com", "a.b.c.com"]), ["a.b.com"]);
        assert_eq!(matched("ab*ba", &["aba", "abba", "ab-ba", "ab.ba", "abba."]), ["abba", "ab-ba", "abba."]);
        assert_eq!(matched("a*b*b*c", &["abc", "abbc", "a-b-b-c", "abcbc", "abcb"]), ["abbc", "a-b-b-c", "abcbc"]);
        assert_eq!(matched("a*", &["a", "a b", "a\u{e4}", "a\\046b"]), ["a"], "characters that are not of a name");
    }

    #[test]
    fn a_star_alone_is_every_name_and_two_are_one_label_or_more() {
        let names = ["", ".", "a", "a.b.c", "a b", "\u{e4}.example"];
        assert_eq!(matched("*", &names), names);
        let names =
            ["example.com", "a.example.com", "a.b.example.com", "a..example.com", ".example.com", "a b.example.com"];
        assert_eq!(matched("**.example.com", &names), ["a.example.com", "a.b.example.com"]);
        assert_eq!(matched("**.*.com", &["a.com", "a.b.com", "a.b.c.com"]), ["a.b.com", "a.b.c.com"]);
    }

    #[test]
    fn what_no_name_can_be_is_refused() {
        let (label, long) = ("a".repeat(64), format!("{}.a", ["a".repeat(63).as_str(); 4].join(".")));
        assert_eq!(long.len(), 257);
        for (text, expected) in [
            (long.as_str(), Malformed::TooLong),
            (&label, Malformed::Label),
            ("", Malformed::Label),
            (".", Malformed::Label),
            ("a..b", Malformed::Label),
            (".a", Malformed::Label),
            ("a.b..", Malformed::Label),
            ("a b", Malformed::Character),
            ("a/b", Malformed::Character),
            ("\u{e4}.example", Malformed::Character),
            ("*.", Malformed::Stars),
            ("**", Malformed::Stars),
            ("**.", Malformed::Stars),
            ("a.**.b", Malformed::Stars),
            ("**a", Malformed::Stars),
            ("**.**.a", Malformed::Stars),
            ("***.a", Malformed::Stars),
        ] {
            assert_eq!(NamePattern::pattern(text), Err(expected), "{text:?}");
            assert!(NamePattern::name(text).is_err(), "{text:?}");
        }
        assert_eq!(NamePattern::name("*.a"), Err(Malformed::NoPattern));
        let longest = format!("{}.{}", ["a".repeat(63).as_str(); 3].join("."), "b".repeat(61));
        assert_eq!(longest.len(), MAX_NAME);
        NamePattern::name(&format!("{longest}.")).expect("the last dot does not count");
    }

    #[test]
    fn a_pattern_is_written_and_read_as_text() {
        let pattern = NamePattern::pattern("**.Example.com").expect("a pattern");
        let text = serde_json::to_string(&pattern).expect("text");
        assert_eq!(text, r#""**.example.com""#);
        assert_eq!(serde_json::from_str::<NamePattern>(&text).expect("a pattern"), pattern);
        let error = serde_json::from_str::<NamePattern>(r#""a..b""#).expect_err("an empty label").to_string();
        assert!(error.starts_with("the name pattern \"a..b\" has a label that is empty"), "{error}");
        let long = serde_json::to_string(&"\u{7f}".repeat(100_000)).expect("text");
        let error = serde_json::from_str::<NamePattern>(&long).expect_err("too long").to_string();
        assert!(error.len() < 1_000, "{} bytes", error.len());
    }

    #[test]
    fn many_stars_and_a_long_name_do_not_take_long() {
        let label = "a*".repeat(31);
        let pattern = NamePattern::pattern(&[label.as_str(); 4].join(".")).expect("a pattern");
        let name = [format!("{}b", "a".repeat(62)).as_str(); 4].join(".");
        assert!(pattern.matches(&name));
        let pattern = NamePattern::pattern(&format!("{}b*", "a*".repeat(30))).expect("a pattern");
        assert!(!pattern.matches(&"a".repeat(1 << 16)));
    }

    fn naive(pattern: &[u8], name: &[u8]) -> bool {
        match (pattern, name) {
            ([b'*', rest @ ..], _) => {
                naive(rest, name)
                    || name.split_first().is_some_and(|(first, more)| is_inner(*first) && naive(pattern, more))
            }
            ([first, rest @ ..], [own, more @ ..]) => first == own && naive(rest, more),
            ([], []) => true,
            _ => false,
        }
    }

    fn naively(pattern: &str, name: &str) -> bool {
        let Some(own) = pattern.strip_prefix("**.") else {
            return pattern == "*" || naive(pattern.as_bytes(), name.as_bytes());
        };
        let cuts = name.match_indices('.').map(|(at, _)| name.split_at(at));
        cuts.into_iter().any(|(labels, rest)| {
            labels.bytes().all(|b| is_inner(b) || b == b'.') && naive(own.as_bytes(), &rest.as_bytes()[1..])
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

        #[test]
        fn it_matches_as_the_definition_does(
            pattern in "(\\*\\*\\.)?[ab*]{1,4}(\\.[ab*]{1,4}){0,2}",
            name in "[ab]{1,4}(\\.[ab-]{1,3}){0,3}|[ab ]{1,4}\\.a",
        ) {
            let Ok(own) = NamePattern::pattern(&pattern) else {
                let rest = pattern.strip_prefix("**.").unwrap_or(&pattern);
                prop_assert!(rest.contains("**"), "{}", pattern);
                return Ok(());
            };
            prop_assert_eq!(own.matches(&name), naively(&pattern, &name), "{} {}", pattern, name);
            let shouted = format!("{}.", name.to_ascii_uppercase());
            prop_assert_eq!(own.matches(&shouted), own.matches(&name), "{} {}", pattern, shouted);
        }
    }
}
