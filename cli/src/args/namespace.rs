//! Arguments of `wharf namespace`.

use std::{collections::BTreeMap, str::FromStr};

use clap::Subcommand;

/// `wharf namespace ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum NamespaceCommand {
    /// List the namespaces whose labels are known.
    #[command(visible_alias = "ls", after_help = "Examples:\n  wharf namespace list\n  wharf namespace list -o json")]
    List,
    /// Replace the labels of a namespace: those that are not named go.
    #[command(after_help = "Example:\n  wharf namespace set shop team=a stage=production")]
    Set {
        /// The namespace.
        name: String,
        /// A label of the new set.
        #[arg(value_name = "KEY=VALUE", required = true)]
        labels: Vec<Label>,
    },
    /// Forget the labels of a namespace.
    #[command(after_help = "Example:\n  wharf namespace delete shop")]
    Delete {
        /// The namespace.
        name: String,
    },
}

/// A label; the agent knows which keys and values are allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Label {
    key: String,
    value: String,
}

/// The text is no label.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a label is KEY=VALUE, with a key; the value may be empty")]
pub(crate) struct NoLabel;

impl FromStr for Label {
    type Err = NoLabel;

    fn from_str(text: &str) -> Result<Self, NoLabel> {
        let (key, value) = text.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or(NoLabel)?;
        Ok(Self { key: key.to_owned(), value: value.to_owned() })
    }
}

impl Label {
    /// Labels by key, or a key that is there twice.
    ///
    /// # Errors
    /// The key, when one is there twice.
    pub(crate) fn by_key(labels: Vec<Self>) -> Result<BTreeMap<String, String>, String> {
        let mut all = BTreeMap::new();
        for Self { key, value } in labels {
            if all.insert(key.clone(), value).is_some() {
                return Err(key);
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_has_a_key_and_perhaps_a_value() {
        let parsed = |text: &str| text.parse::<Label>().map(|label| (label.key, label.value));
        for (text, key, value) in [("a=b", "a", "b"), ("x/y=", "x/y", ""), ("a=b=c", "a", "b=c")] {
            assert_eq!(parsed(text), Ok((key.to_owned(), value.to_owned())));
        }
        for bad in ["", "a", "=", "=b"] {
            assert_eq!(parsed(bad), Err(NoLabel), "{bad:?}");
        }
    }

    #[test]
    fn a_key_is_there_once() {
        let labels = |texts: &[&str]| Label::by_key(texts.iter().map(|text| text.parse().unwrap()).collect());
        assert_eq!(labels(&["a=1", "b=2", "a=1"]), Err("a".to_owned()));
        let (a, b) = (("a".to_owned(), "1".to_owned()), ("b".to_owned(), "2".to_owned()));
        assert_eq!(labels(&["b=2", "a=1"]), Ok(BTreeMap::from([a, b])));
    }
}
