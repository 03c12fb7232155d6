//! Labels on a command line, as kubectl has them: `KEY=VALUE`, several with commas between, and `KEY-` to remove one.
//! A source and `:` may stand before the key.

use std::{collections::BTreeMap, str::FromStr};

use wharf_policy::read::{is_label_key, is_label_value};

/// A label that is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Label {
    /// Who vouches for it, where that is named.
    pub(crate) source: Option<String>,
    pub(crate) key: String,
    pub(crate) value: String,
}

/// Labels with commas between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Labels(Vec<Label>);

/// A change of one label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LabelChange {
    /// It gets this value.
    Set(Label),
    /// The labels of this key are removed; with a source, only the label of that source.
    Remove { source: Option<String>, key: String },
}

/// Changes with commas between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LabelChanges(pub(crate) Vec<LabelChange>);

/// Why a text is no label.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadLabel {
    #[error("{0:?} has no value: write KEY=VALUE, for example app=web")]
    NoValue(String),
    #[error("{0:?} has no value: write KEY=VALUE, for example app=web, or KEY- to remove the label")]
    NoChange(String),
    #[error(
        "the key {0:?} is none: write letters, digits, -, _ and ., a letter or digit at both ends, at most 63, for example app or \
         example.com/app"
    )]
    Key(String),
    #[error(
        "the value {0:?} of label {1} is none: write letters, digits, -, _ and ., a letter or digit at both ends, at most 63, or \
         nothing, for example {1}=web-1"
    )]
    Value(String, String),
    #[error("the source {0:?} is none: write lower-case letters and digits, for example k8s:app=web")]
    Source(String),
    #[error("label {0} is there twice: give it one value, for example {0}=web")]
    Twice(String),
    #[error("labels of {0} have no other source than {1}: write KEY=VALUE, for example app=web")]
    OtherSource(&'static str, &'static str),
}

impl FromStr for Label {
    type Err = BadLabel;

    fn from_str(text: &str) -> Result<Self, BadLabel> {
        let (name, value) = text.split_once('=').ok_or_else(|| BadLabel::NoValue(text.to_owned()))?;
        let (source, key) = name_of(name)?;
        if !is_label_value(value) {
            return Err(BadLabel::Value(value.to_owned(), key));
        }
        Ok(Self { source, key, value: value.to_owned() })
    }
}

/// A label's source, where it has one, and its key.
fn name_of(text: &str) -> Result<(Option<String>, String), BadLabel> {
    let (source, key) = match text.split_once(':') {
        Some((source, key)) => (Some(source), key),
        None => (None, text),
    };
    let is_source =
        |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit()) && s != "reserved";
    if let Some(source) = source.filter(|source| !is_source(source)) {
        return Err(BadLabel::Source(source.to_owned()));
    }
    if !is_label_key(key) {
        return Err(BadLabel::Key(key.to_owned()));
    }
    Ok((source.map(str::to_owned), key.to_owned()))
}

impl FromStr for Labels {
    type Err = BadLabel;

    fn from_str(text: &str) -> Result<Self, BadLabel> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl FromStr for LabelChange {
    type Err = BadLabel;

    fn from_str(text: &str) -> Result<Self, BadLabel> {
        match text.strip_suffix('-') {
            Some(name) if !text.contains('=') => {
                let (source, key) = name_of(name)?;
                Ok(Self::Remove { source, key })
            }
            _ => text.parse().map(Self::Set).map_err(|error| match error {
                BadLabel::NoValue(text) => BadLabel::NoChange(text),
                other => other,
            }),
        }
    }
}

impl FromStr for LabelChanges {
    type Err = BadLabel;

    fn from_str(text: &str) -> Result<Self, BadLabel> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(Self)
    }
}

impl From<Label> for Labels {
    fn from(label: Label) -> Self {
        Self(vec![label])
    }
}

impl Labels {
    /// The labels of several arguments.
    pub(crate) fn all(arguments: Vec<Self>) -> Vec<Label> {
        arguments.into_iter().flat_map(|labels| labels.0).collect()
    }

    /// The labels of `subject`, which are all of one source, by key.
    pub(crate) fn by_key(
        arguments: Vec<Self>,
        subject: &'static str,
        source: &'static str,
    ) -> Result<BTreeMap<String, String>, BadLabel> {
        let mut all = BTreeMap::new();
        for label in Self::all(arguments) {
            let Label { source: of, key, value } = label;
            if of.is_some_and(|of| of != source) {
                return Err(BadLabel::OtherSource(subject, source));
            }
            if all.insert(key.clone(), value).is_some() {
                return Err(BadLabel::Twice(key));
            }
        }
        Ok(all)
    }
}

impl LabelChanges {
    /// The changes of several arguments; each label is changed once.
    pub(crate) fn all(arguments: Vec<Self>) -> Result<Vec<LabelChange>, BadLabel> {
        let all: Vec<LabelChange> = arguments.into_iter().flat_map(|changes| changes.0).collect();
        let mut names = std::collections::BTreeSet::new();
        for change in &all {
            let (LabelChange::Set(Label { source, key, .. }) | LabelChange::Remove { source, key }) = change;
            if !names.insert((source, key)) {
                return Err(BadLabel::Twice(key.clone()));
            }
        }
        Ok(all)
    }
}

/// The labels of an endpoint (`source:key=value`) after the changes. A label without a source keeps the source of the
/// endpoint's label of that key; a new label is of the source `k8s`.
pub(crate) fn changed(labels: &[String], changes: Vec<LabelChange>) -> Vec<String> {
    // Those that the agent gives stay without being sent.
    let mut labels: Vec<String> = labels.iter().filter(|label| !label.starts_with("reserved:")).cloned().collect();
    for change in changes {
        match change {
            LabelChange::Set(Label { source, key, value }) => {
                let source = source.or_else(|| source_of(&labels, &key)).unwrap_or_else(|| "k8s".to_owned());
                labels.retain(|label| !is_named(label, Some(&source), &key));
                labels.push(format!("{source}:{key}={value}"));
            }
            LabelChange::Remove { source, key } => labels.retain(|label| !is_named(label, source.as_deref(), &key)),
        }
    }
    labels.sort();
    labels
}

fn source_of(labels: &[String], key: &str) -> Option<String> {
    let label = labels.iter().find(|label| is_named(label, None, key))?;
    Some(label.split_once(':')?.0.to_owned())
}

fn is_named(label: &str, source: Option<&str>, key: &str) -> bool {
    label.split_once(':').is_some_and(|(of, rest)| {
        source.is_none_or(|source| source == of) && rest.split_once('=').map_or(rest, |(key, _)| key) == key
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(source: Option<&str>, key: &str, value: &str) -> Label {
        Label { source: source.map(str::to_owned), key: key.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn labels_are_kubectls() {
        let parsed = |text: &str| text.parse::<Labels>().map(|labels| labels.0);
        assert_eq!(parsed("a=b"), Ok(vec![label(None, "a", "b")]));
        assert_eq!(parsed("example.com/y="), Ok(vec![label(None, "example.com/y", "")]));
        let two = vec![label(Some("k8s"), "app", "db"), label(Some("k8s"), "tier", "x")];
        assert_eq!(parsed("k8s:app=db,k8s:tier=x"), Ok(two));
        for (bad, words) in [
            ("", "write KEY=VALUE, for example app=web"),
            ("a", "\"a\" has no value"),
            ("a=b,", "\"\" has no value"),
            ("=b", "the key \"\" is none"),
            ("-a=b", "for example app or example.com/app"),
            ("a=b c", "the value \"b c\" of label a is none"),
            ("a=b=c", "for example a=web-1"),
            (":a=b", "the source \"\" is none"),
            ("K8s:a=b", "for example k8s:app=web"),
            ("reserved:a=b", "the source \"reserved\" is none"),
        ] {
            let told = parsed(bad).unwrap_err().to_string();
            assert!(told.contains(words) && told.contains("for example"), "{bad:?}: {told}");
        }
    }

    #[test]
    fn a_key_is_there_once_and_of_one_source() {
        let of = |texts: &[&str]| {
            Labels::by_key(texts.iter().map(|text| text.parse().unwrap()).collect(), "a sandbox", "cni")
        };
        assert_eq!(of(&["a=1", "b=2,a=1"]), Err(BadLabel::Twice("a".to_owned())));
        assert_eq!(of(&["k8s:a=1"]), Err(BadLabel::OtherSource("a sandbox", "cni")));
        let (a, b) = (("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned()));
        assert_eq!(of(&["b=2", "cni:a=1"]), Ok(BTreeMap::from([a, b])));
        let twice = ["a=1", "a-"].map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(LabelChanges::all(twice), Err(BadLabel::Twice("a".to_owned())));
    }

    #[test]
    fn changes_leave_the_other_labels() {
        let labels = ["cni:app=web", "k8s:app=old", "k8s:tier=front", "reserved:init="].map(str::to_owned);
        let after = |text: &str| {
            let changes = LabelChanges::all(vec![text.parse().unwrap()]).unwrap();
            changed(&labels, changes)
        };
        assert_eq!(after("k8s:app=new"), ["cni:app=web", "k8s:app=new", "k8s:tier=front"]);
        assert_eq!(after("tier=back,new=1"), ["cni:app=web", "k8s:app=old", "k8s:new=1", "k8s:tier=back"]);
        assert_eq!(after("app-"), ["k8s:tier=front"]);
        assert_eq!(after("k8s:app-,cni:app=db"), ["cni:app=db", "k8s:tier=front"]);
        let told = "app".parse::<LabelChanges>().unwrap_err().to_string();
        assert!(told.contains("or KEY- to remove the label"), "{told}");
    }
}
