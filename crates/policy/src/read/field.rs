//! Fields and refusals.

use std::{fmt::Display, ops::RangeInclusive, sync::Arc};

use super::{
    MAX_REFUSALS, Refusal,
    tree::{Entry, Node, Value},
};
use crate::model::Origin;

const SHOWN: usize = 64;

/// A recorded refusal. Only [`Reader`] creates it, so no content is dropped silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refused(());

pub(super) type Read<T> = Result<T, Refused>;

#[derive(Debug, Clone)]
pub(super) struct Field<'a> {
    node: &'a Node,
    path: String,
}

impl<'a> Field<'a> {
    pub(super) const fn root(node: &'a Node) -> Self {
        Self { node, path: String::new() }
    }

    pub(super) const fn line(&self) -> u32 {
        self.node.line
    }

    pub(super) const fn value(&self) -> &'a Value {
        &self.node.value
    }

    fn child(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }
}

#[derive(Debug)]
pub(super) struct Object<'a> {
    field: Field<'a>,
    entries: &'a [Entry],
    /// Replaces refusals of missing keys.
    refused: Option<Refused>,
}

impl<'a> Object<'a> {
    /// `None` if absent or null, as in Kubernetes.
    pub(super) fn get(&self, key: &str) -> Option<Field<'a>> {
        let entry = self.entries.iter().find(|entry| entry.key == key)?;
        let set = !matches!(entry.node.value, Value::Null);
        set.then(|| Field { node: &entry.node, path: self.field.child(key) })
    }

    pub(super) fn set<'k>(&self, keys: &[&'k str]) -> Vec<&'k str> {
        keys.iter().copied().filter(|key| self.get(key).is_some()).collect()
    }

    /// For user-defined keys.
    pub(super) fn entries(&self) -> impl Iterator<Item = (&'a str, Field<'a>)> {
        let path = self.field.path.clone();
        self.entries.iter().map(move |entry| {
            (entry.key.as_str(), Field { node: &entry.node, path: format!("{path}[{}]", quoted(&entry.key)) })
        })
    }

    pub(super) const fn field(&self) -> &Field<'a> {
        &self.field
    }
}

#[derive(Debug)]
pub(super) struct Reader {
    file: Arc<str>,
    pub(super) document: Arc<str>,
    refusals: Vec<Refusal>,
    more: usize,
}

impl Reader {
    pub(super) fn new(file: &str) -> Self {
        Self { file: file.into(), document: "".into(), refusals: Vec::new(), more: 0 }
    }

    pub(super) fn refusals(mut self) -> Vec<Refusal> {
        self.refusals.sort_by_key(Refusal::line);
        if self.more > 0 {
            self.refusals.push(Refusal::More { file: self.file, count: self.more });
        }
        self.refusals
    }

    pub(super) fn refuse_text(&mut self, line: u32, reason: impl Into<String>, remedy: impl Into<String>) -> Refused {
        let (file, reason, remedy) = (Arc::clone(&self.file), reason.into(), remedy.into());
        self.add(Refusal::Text { file, line, reason, remedy })
    }

    pub(super) fn refuse(
        &mut self,
        field: &Field<'_>,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Refused {
        let path = if field.path.is_empty() { "document".to_owned() } else { field.path.clone() };
        self.refuse_at(field.line(), path, reason, remedy)
    }

    pub(super) fn refuse_key(
        &mut self,
        object: &Object<'_>,
        key: &str,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Refused {
        let line = object.entries.iter().find(|entry| entry.key == key).map_or(object.field.line(), |entry| entry.line);
        self.refuse_at(line, object.field.child(&plain(key)), reason, remedy)
    }

    fn refuse_at(&mut self, line: u32, field: String, reason: impl Into<String>, remedy: impl Into<String>) -> Refused {
        let origin = Origin { file: Arc::clone(&self.file), line, document: Arc::clone(&self.document), field };
        self.add(Refusal::Field { origin, reason: reason.into(), remedy: remedy.into() })
    }

    fn add(&mut self, refusal: Refusal) -> Refused {
        if self.refusals.len() < MAX_REFUSALS {
            self.refusals.push(refusal);
        } else {
            self.more += 1;
        }
        Refused(())
    }

    pub(super) fn origin(&self, field: &Field<'_>) -> Origin {
        let (file, document) = (Arc::clone(&self.file), Arc::clone(&self.document));
        Origin { file, line: field.line(), document, field: field.path.clone() }
    }

    pub(super) fn map<'a>(&mut self, field: &Field<'a>) -> Read<Object<'a>> {
        match &field.node.value {
            Value::Map(entries) => Ok(Object { field: field.clone(), entries, refused: None }),
            other => Err(self.refuse(field, format!("is {}", other.kind()), "write a mapping of keys and values")),
        }
    }

    pub(super) fn object<'a>(
        &mut self,
        field: &Field<'a>,
        known: &[&str],
        unsupported: &[(&str, &str)],
    ) -> Read<Object<'a>> {
        let mut object = self.map(field)?;
        for Entry { key, node, .. } in object.entries {
            if known.contains(&key.as_str()) {
                continue;
            }
            match unsupported.iter().find(|(name, _)| name == key) {
                Some((_, remedy)) if !matches!(node.value, Value::Null) => {
                    object.refused = Some(self.refuse_key(&object, key, "is not supported", *remedy));
                }
                Some(_) => {}
                None => {
                    let remedy = format!("remove it, or write one of {}", known.join(", "));
                    object.refused = Some(self.refuse_key(&object, key, "is no field here", remedy));
                }
            }
        }
        Ok(object)
    }

    pub(super) fn refuse_empty(&mut self, object: &Object<'_>, reason: &str, remedy: impl Into<String>) -> Refused {
        object.refused.unwrap_or_else(|| self.refuse(&object.field, reason, remedy))
    }

    pub(super) fn refuse_missing(&mut self, object: &Object<'_>, key: &str, remedy: &str) -> Refused {
        object.refused.unwrap_or_else(|| self.refuse_key(object, key, "is missing", remedy))
    }

    pub(super) fn required<'a>(&mut self, object: &Object<'a>, key: &str, remedy: &str) -> Read<Field<'a>> {
        object.get(key).ok_or_else(|| self.refuse_missing(object, key, remedy))
    }

    pub(super) fn text<'a>(&mut self, field: &Field<'a>) -> Read<&'a str> {
        match &field.node.value {
            Value::Text(text) => Ok(text),
            other @ (Value::Bool(_) | Value::Integer(_) | Value::Fraction) => {
                Err(self.refuse(field, format!("is {}, not text", other.kind()), "put it in quotes"))
            }
            other => Err(self.refuse(field, format!("is {}", other.kind()), "write text")),
        }
    }

    pub(super) fn boolean(&mut self, field: &Field<'_>) -> Read<bool> {
        match &field.node.value {
            Value::Bool(value) => Ok(*value),
            other => Err(self.refuse(field, format!("is {}", other.kind()), "write true or false")),
        }
    }

    pub(super) fn number<T>(&mut self, field: &Field<'_>, range: RangeInclusive<T>) -> Read<T>
    where
        T: TryFrom<i128> + PartialOrd + Display,
    {
        let remedy = format!("write a whole number from {} to {}", range.start(), range.end());
        match &field.node.value {
            Value::Integer(number) => match T::try_from(*number) {
                Ok(value) if range.contains(&value) => Ok(value),
                _ => Err(self.refuse(field, format!("is {number}"), remedy)),
            },
            other => Err(self.refuse(field, format!("is {}", other.kind()), remedy)),
        }
    }

    pub(super) fn word<T: Copy>(&mut self, field: &Field<'_>, words: &[(&str, T)]) -> Read<T> {
        let text = self.text(field)?;
        match words.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(*value),
            None => {
                let words: Vec<_> = words.iter().map(|(word, _)| *word).collect();
                Err(self.refuse(field, format!("is {}", quoted(text)), format!("write one of {}", words.join(", "))))
            }
        }
    }

    pub(super) fn list<'a>(&mut self, field: &Field<'a>) -> Read<Vec<Field<'a>>> {
        match &field.node.value {
            Value::List(items) => {
                let item = |(at, node)| Field { node, path: format!("{}[{at}]", field.path) };
                Ok(items.iter().enumerate().map(item).collect())
            }
            other => Err(self.refuse(field, format!("is {}", other.kind()), "write a list")),
        }
    }

    /// Reports all errors.
    pub(super) fn each<'a, T>(
        &mut self,
        field: &Field<'a>,
        mut read: impl FnMut(&mut Self, &Field<'a>) -> Read<T>,
    ) -> Read<Vec<T>> {
        let items: Vec<_> = self.list(field)?.iter().map(|item| read(self, item)).collect();
        items.into_iter().collect()
    }

    pub(super) fn some<'a, T>(
        &mut self,
        field: &Field<'a>,
        remedy: &str,
        read: impl FnMut(&mut Self, &Field<'a>) -> Read<T>,
    ) -> Read<Vec<T>> {
        let items = self.each(field, read)?;
        if items.is_empty() { Err(self.refuse(field, "is empty", remedy)) } else { Ok(items) }
    }
}

/// Untrusted text: short, without control characters.
pub(super) fn quoted(text: &str) -> String {
    format!("{:?}", cut(text, SHOWN))
}

pub(super) fn cut(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

fn plain(key: &str) -> String {
    let word = !key.is_empty() && key.len() <= SHOWN && key.bytes().all(|b| b.is_ascii_alphanumeric());
    if word { key.to_owned() } else { quoted(key) }
}
