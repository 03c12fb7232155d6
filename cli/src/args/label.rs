//! Labels in kubectl's syntax: `[SOURCE:]KEY=VALUE`, comma-separated, and `KEY-` to remove a label.

use std::{collections::BTreeMap, fmt, str::FromStr};

use wharf_policy::read::{is_label_key, is_label_value};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Label {
    pub(crate) source: Option<String>,
    pub(crate) key: String,
    pub(crate) value: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Labels(Vec<Label>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LabelChange {
    Set(Label),
    /// Removes a key's labels, or only one source's label.
    Remove {
        source: Option<String>,
        key: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LabelChanges(pub(crate) Vec<LabelChange>);

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
    #[error("label {key} is given twice, as {first} and {second}: give it once, for example {first}")]
    Twice { key: String, first: String, second: String },
    /// A source for a subject with only one source.
    #[error("{given}: each label of {subject} has the source {source_name}: leave the source out, for example {plain}")]
    OtherSource { given: String, subject: &'static str, source_name: &'static str, plain: String },
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

impl Labels {
    pub(crate) fn all(arguments: Vec<Self>) -> Vec<Label> {
        arguments.into_iter().flat_map(|labels| labels.0).collect()
    }

    /// Labels by key, for a `subject` with only one source.
    pub(crate) fn by_key(
        arguments: Vec<Self>,
        subject: &'static str,
        source: &'static str,
    ) -> Result<BTreeMap<String, String>, BadLabel> {
        let all: Vec<LabelChange> = Self::all(arguments).into_iter().map(LabelChange::Set).collect();
        each_once(&all)?;
        let mut labels = BTreeMap::new();
        for change in all {
            change.of_source(subject, source)?.apply(&mut labels);
        }
        Ok(labels)
    }
}

impl LabelChanges {
    /// Fails if a label is changed twice.
    pub(crate) fn all(arguments: Vec<Self>) -> Result<Vec<LabelChange>, BadLabel> {
        let all: Vec<LabelChange> = arguments.into_iter().flat_map(|changes| changes.0).collect();
        each_once(&all)?;
        Ok(all)
    }

    /// Replaces all labels. Fails if a label is set twice.
    pub(crate) fn set(arguments: Vec<Labels>) -> Result<Vec<LabelChange>, BadLabel> {
        let all: Vec<LabelChange> = Labels::all(arguments).into_iter().map(LabelChange::Set).collect();
        each_once(&all)?;
        Ok(all)
    }
}

impl LabelChange {
    fn name(&self) -> (Option<&str>, &str) {
        let (Self::Set(Label { source, key, .. }) | Self::Remove { source, key }) = self;
        (source.as_deref(), key)
    }

    /// Fails if the change has another source than `source`.
    pub(crate) fn of_source(self, subject: &'static str, source: &'static str) -> Result<Self, BadLabel> {
        if self.name().0.is_none_or(|of| of == source) {
            return Ok(self);
        }
        let given = self.to_string();
        let plain = match self {
            Self::Set(label) => Self::Set(Label { source: None, ..label }),
            Self::Remove { key, .. } => Self::Remove { source: None, key },
        };
        Err(BadLabel::OtherSource { given, subject, source_name: source, plain: plain.to_string() })
    }

    pub(crate) fn apply(self, labels: &mut BTreeMap<String, String>) {
        match self {
            Self::Set(Label { key, value, .. }) => drop(labels.insert(key, value)),
            Self::Remove { key, .. } => drop(labels.remove(&key)),
        }
    }
}

impl fmt::Display for LabelChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (source, key) = self.name();
        if let Some(source) = source {
            write!(f, "{source}:")?;
        }
        match self {
            Self::Set(Label { value, .. }) => write!(f, "{key}={value}"),
            Self::Remove { .. } => write!(f, "{key}-"),
        }
    }
}

/// Rejects two changes of one label. A change without a source conflicts with every other change of its key.
fn each_once(changes: &[LabelChange]) -> Result<(), BadLabel> {
    let mut by_key: BTreeMap<&str, Vec<&LabelChange>> = BTreeMap::new();
    for change in changes {
        let (source, key) = change.name();
        let others = by_key.entry(key).or_default();
        let is_same = |other: &&&LabelChange| {
            let of = other.name().0;
            source.is_none() || of.is_none() || source == of
        };
        if let Some(first) = others.iter().find(is_same) {
            let (first, second) = (first.to_string(), change.to_string());
            return Err(BadLabel::Twice { key: key.to_owned(), first, second });
        }
        others.push(change);
    }
    Ok(())
}

/// The labels of an endpoint (`source:key=value`) after the changes. A label without a source keeps the source of the
/// endpoint's label with that key; a new label gets `k8s`.
pub(crate) fn changed(labels: &[String], changes: Vec<LabelChange>) -> Vec<String> {
    // The agent adds its reserved labels.
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
        let told = |result: Result<_, BadLabel>| result.map(|_: BTreeMap<_, _>| ()).expect_err("refused").to_string();
        let twice = "label a is given twice, as a=1 and a=2: give it once, for example a=1";
        assert_eq!(told(of(&["a=1", "b=2,a=2"])), twice);
        assert!(told(of(&["a=1,cni:a=1"])).contains("as a=1 and cni:a=1"));
        let other = "k8s:a=1: each label of a sandbox has the source cni: leave the source out, for example a=1";
        assert_eq!(told(of(&["k8s:a=1"])), other);
        let (a, b) = (("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned()));
        assert_eq!(of(&["b=2", "cni:a=1"]), Ok(BTreeMap::from([a, b])));
    }

    #[test]
    fn a_label_is_changed_once() {
        let changes = |texts: &[&str]| LabelChanges::all(texts.iter().map(|text| text.parse().unwrap()).collect());
        for (texts, both) in [
            (&["a=1", "a-"] as &[&str], "as a=1 and a-"),
            (&["a-,a-"], "as a- and a-"),
            (&["k8s:a=1,k8s:a=2"], "as k8s:a=1 and k8s:a=2"),
            (&["cni:a=1,a=2"], "as cni:a=1 and a=2"),
            (&["cni:a=1", "k8s:a=2", "a-"], "as cni:a=1 and a-"),
        ] {
            let why = changes(texts).unwrap_err().to_string();
            assert!(why.contains(both) && why.contains("for example"), "{texts:?}: {why}");
        }
        assert_eq!(changes(&["cni:a=1", "k8s:a-,b=1"]).map(|all| all.len()), Ok(3), "of two sources");
        let set = |text: &str| LabelChanges::set(vec![text.parse().unwrap()]);
        assert!(set("app=a,app=b").unwrap_err().to_string().contains("as app=a and app=b"));
        assert_eq!(set("cni:app=a,k8s:app=b").map(|all| all.len()), Ok(2));
    }

    #[test]
    fn a_change_of_another_source_changes_nothing() {
        let mut labels = BTreeMap::from([("stage".to_owned(), "test".to_owned())]);
        let change = |text: &str| text.parse::<LabelChange>().unwrap().of_source("a namespace", "k8s");
        let why = change("cni:stage-").unwrap_err().to_string();
        assert_eq!(
            why,
            "cni:stage-: each label of a namespace has the source k8s: leave the source out, for example stage-"
        );
        change("k8s:stage-").expect("the source of the labels").apply(&mut labels);
        change("team=a").expect("no source").apply(&mut labels);
        assert_eq!(labels, BTreeMap::from([("team".to_owned(), "a".to_owned())]));
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
