//! Label selectors in kubectl's syntax.

use std::str::FromStr;

/// A conjunction; matches everything when empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    /// `k8s` in `k8s:app`; `None` matches any source.
    source: Option<String>,
    key: String,
    test: Test,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    /// Also matches a missing label.
    NotIn(Vec<String>),
    Exists,
    Missing,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} is no requirement of a selector; examples: app=web, k8s:app=web,tier!=db, 'env in (a,b)', app, '!app'")]
pub(crate) struct BadSelector(String);

impl FromStr for Selector {
    type Err = BadSelector;

    fn from_str(text: &str) -> Result<Self, BadSelector> {
        requirements(text).into_iter().map(Requirement::parse).collect::<Result<_, _>>().map(Self)
    }
}

/// Splits at commas outside parentheses.
fn requirements(text: &str) -> Vec<&str> {
    let mut depth = 0_i32;
    text.split(move |c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    })
    .map(str::trim)
    .collect()
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, BadSelector> {
        let bad = || BadSelector(format!("{text:?}"));
        let (name, test) = Self::parts(text).ok_or_else(bad)?;
        let (source, key) = match name.split_once(':') {
            Some((source, key)) => (Some(source), key),
            None => (None, name),
        };
        let is_word =
            |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
        let values: &[String] = match &test {
            Test::In(values) | Test::NotIn(values) => values,
            Test::Exists | Test::Missing => &[],
        };
        let is_value = |value: &String| value.is_empty() || is_word(value);
        if !is_word(key) || !source.is_none_or(is_word) || !values.iter().all(is_value) {
            return Err(bad());
        }
        Ok(Self { source: source.map(str::to_owned), key: key.to_owned(), test })
    }

    fn parts(text: &str) -> Option<(&str, Test)> {
        if let Some(name) = text.strip_prefix('!') {
            return Some((name.trim(), Test::Missing));
        }
        if let Some((head, list)) = text.strip_suffix(')').and_then(|text| text.split_once('(')) {
            let (name, operator) = head.trim().rsplit_once(char::is_whitespace)?;
            let values = list.split(',').map(|value| value.trim().to_owned()).collect();
            return match operator {
                "in" => Some((name.trim(), Test::In(values))),
                "notin" => Some((name.trim(), Test::NotIn(values))),
                _ => None,
            };
        }
        let one = |value: &str| vec![value.trim().to_owned()];
        Some(match (text.split_once("!="), text.split_once('=')) {
            (Some((name, value)), _) => (name.trim(), Test::NotIn(one(value))),
            (None, Some((name, value))) => (name.trim(), Test::In(one(value.strip_prefix('=').unwrap_or(value)))),
            (None, None) => (text, Test::Exists),
        })
    }

    fn holds<'a>(&self, labels: impl Iterator<Item = (&'a str, &'a str, &'a str)>) -> bool {
        let mut values = labels
            .filter(|(source, key, _)| *key == self.key && self.source.as_deref().is_none_or(|s| s == *source))
            .map(|(_, _, value)| value);
        match &self.test {
            Test::In(wanted) => values.any(|value| wanted.iter().any(|w| w == value)),
            Test::NotIn(unwanted) => !values.any(|value| unwanted.iter().any(|w| w == value)),
            Test::Exists => values.next().is_some(),
            Test::Missing => values.next().is_none(),
        }
    }
}

impl Selector {
    /// Labels are `source:key=value`.
    pub(crate) fn matches<'a>(&self, labels: impl Iterator<Item = &'a str> + Clone) -> bool {
        let parts = labels.map(|label| {
            let (name, value) = label.split_once('=').unwrap_or((label, ""));
            let (source, key) = name.split_once(':').unwrap_or(("", name));
            (source, key, value)
        });
        self.0.iter().all(|requirement| requirement.holds(parts.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selector_is_kubectls() {
        let labels = ["k8s:app=web", "container:app=old", "k8s:tier=front", "k8s:io.x/y="];
        for (selector, wanted) in [
            ("app=web", true),
            ("app==web", true),
            ("app=old", true),
            ("k8s:app=old", false),
            ("container:app=old", true),
            ("app=web,tier=front", true),
            ("app=web,tier=back", false),
            ("tier!=back", true),
            ("none!=x", true),
            ("app!=web", false),
            ("app", true),
            ("none", false),
            ("!none", true),
            ("!app", false),
            ("io.x/y=", true),
            ("tier in (back, front)", true),
            ("tier in (back),app", false),
            ("tier notin (back,side),app", true),
            ("tier notin (front)", false),
        ] {
            let parsed: Selector = selector.parse().unwrap();
            assert_eq!(parsed.matches(labels.iter().copied()), wanted, "{selector}");
        }
        for bad in ["", "=x", "a b", "app=web,", "app in web", "app=we b", "in (a)", "app=(a)", "app in (a", "!"] {
            assert!(bad.parse::<Selector>().is_err(), "{bad:?}");
        }
    }
}
