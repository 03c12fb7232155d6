//! Text to trees of values with lines.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::{Error, MergeKeyPolicy, Spanned};

use super::MAX_DOCUMENTS;

/// Policies need a dozen levels; `managedFields` a few more.
const MAX_DEPTH: usize = 48;
const MAX_NODES: usize = 1_000_000;
const MAX_ALIASES: usize = 10_000;
/// Parser events from aliases.
const MAX_COPIED: usize = 20_000;
/// Levels add up and must fit on the stack.
const MAX_ALIAS_DEPTH: usize = 4;

#[derive(Debug)]
pub(super) struct Node {
    /// From 1; the alias's for an alias.
    pub(super) line: u32,
    pub(super) value: Value,
}

#[derive(Debug)]
pub(super) enum Value {
    /// `null`, `~` or empty.
    Null,
    /// Also YAML 1.1 words such as `on`, as in Kubernetes.
    Bool(bool),
    Integer(i128),
    /// With a fraction or a leading zero.
    Fraction,
    Text(String),
    List(Vec<Node>),
    /// In text order, with unique keys.
    Map(Vec<Entry>),
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) line: u32,
    pub(super) node: Node,
}

impl Value {
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "a boolean",
            Self::Integer(_) => "a number",
            Self::Fraction => "a number that is not written as a whole one",
            Self::Text(_) => "text",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
        }
    }
}

#[derive(Debug)]
pub(super) struct Malformed {
    pub(super) line: u32,
    pub(super) reason: String,
    pub(super) remedy: &'static str,
}

/// Drops empty documents.
pub(super) fn parse(text: &str) -> Result<Vec<Node>, Malformed> {
    // The parser would skip the rest of the text.
    if let Some((before, _)) = text.split_once('\0') {
        let line = u32::try_from(before.matches('\n').count()).unwrap_or(u32::MAX).saturating_add(1);
        let reason = "has a zero byte, which neither YAML nor JSON may have".to_owned();
        return Err(Malformed {
            line,
            reason,
            remedy: "write the text anew: zero bytes stand where a write was cut off",
        });
    }
    let options = serde_saphyr::options! {
        with_snippet: false,
        merge_keys: MergeKeyPolicy::Error,
        budget: serde_saphyr::budget! {
            max_documents: MAX_DOCUMENTS,
            max_depth: MAX_DEPTH,
            max_nodes: MAX_NODES,
            max_events: 3 * MAX_NODES,
            max_anchors: MAX_ALIASES,
            max_aliases: MAX_ALIASES,
            // Expansion is bounded below.
            enforce_alias_anchor_ratio: false,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_COPIED,
            max_replay_stack_depth: MAX_ALIAS_DEPTH,
        },
    };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| malformed(&error))
}

fn malformed(error: &Error) -> Malformed {
    let line = error.location().map_or(1, |location| line(location.line()));
    let (reason, remedy) = match error {
        Error::Budget { .. } => (
            format!(
                "more than a text may have: {MAX_DOCUMENTS} documents, {MAX_NODES} values, {MAX_DEPTH} levels of lists \
                 and mappings, {MAX_ALIASES} anchors or aliases"
            ),
            "split the text",
        ),
        Error::AliasError { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. }
        | Error::UnknownAnchor { .. }
        | Error::RecursiveReferencesRequireWeakTypes { .. } => (
            format!(
                "an alias (`*`) is unknown, stands for itself, or is more than {MAX_COPIED} values or {MAX_ALIAS_DEPTH} \
                 aliases deep"
            ),
            "write out what it stands for",
        ),
        Error::MergeKeyNotAllowed { .. } => {
            ("a merge key (`<<`) is not supported".to_owned(), "write out the fields that it stands for")
        }
        Error::DuplicateMappingKey { key, .. } => (
            match key {
                Some(key) => format!("the key {} is there twice", super::field::quoted(key)),
                None => "a key is there twice".to_owned(),
            },
            "keep one of them",
        ),
        _ => {
            let reason = super::field::cut(&error.to_string().replace(char::is_control, " "), 300);
            (format!("cannot be parsed as YAML or JSON: {reason}"), "correct the syntax")
        }
    };
    Malformed { line, reason, remedy }
}

fn line(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX).max(1)
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Spanned { value, referenced, .. } = Spanned::<Value>::deserialize(deserializer)?;
        Ok(Self { line: line(referenced.line()), value })
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Integer(value.into()))
    }

    fn visit_f64<E>(self, _value: f64) -> Result<Value, E> {
        Ok(Value::Fraction)
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(Spanned { value: key, referenced, .. }) = items.next_key::<Spanned<String>>()? {
            entries.push(Entry { key, line: line(referenced.line()), node: items.next_value()? });
        }
        Ok(Value::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(text: &str) -> Node {
        parse(text).expect("a document").pop().expect("one")
    }

    fn entry<'a>(node: &'a Node, key: &str) -> &'a Entry {
        let Value::Map(entries) = &node.value else { panic!("{node:?}") };
        entries.iter().find(|entry| entry.key == key).expect("the key")
    }

    #[test]
    fn every_key_and_value_has_its_line() {
        let node = one("# a comment\na:\n  - 1\n  - x: y\n    z: {q: w,\n      e: r}\nb: |\n  text\n");
        assert_eq!(node.line, 2);
        let a = entry(&node, "a");
        assert_eq!((a.line, a.node.line), (2, 3));
        let Value::List(items) = &a.node.value else { panic!("{a:?}") };
        assert_eq!(items.iter().map(|item| item.line).collect::<Vec<_>>(), [3, 4]);
        let z = entry(&items[1], "z");
        assert_eq!((z.line, entry(&z.node, "e").line), (5, 6));
        assert_eq!(entry(&node, "b").line, 7);
    }

    #[test]
    fn lines_count_on_from_document_to_document() {
        let nodes = parse("a: 1\n---\n# nothing\n---\n\nb: 2\n").expect("documents");
        assert_eq!(nodes.iter().map(|node| node.line).collect::<Vec<_>>(), [1, 6]);
    }

    #[test]
    fn an_alias_stands_on_its_own_line() {
        let node = one("a: &x\n  k: v\nb: *x\n");
        assert_eq!(entry(&node, "b").node.line, 3);
        assert_eq!(entry(&entry(&node, "b").node, "k").node.line, 3);
        let Value::Text(text) = &entry(&entry(&node, "b").node, "k").node.value else { panic!("{node:?}") };
        assert_eq!(text, "v");
    }

    #[test]
    fn scalars_are_what_kubernetes_takes_them_for() {
        for (text, kind) in [
            ("80", "a number"),
            ("-1", "a number"),
            ("'80'", "text"),
            ("\"80\"", "text"),
            ("!!str 80", "text"),
            ("on", "a boolean"),
            ("true", "a boolean"),
            ("'true'", "text"),
            ("1.10", "a number that is not written as a whole one"),
            ("010", "a number that is not written as a whole one"),
            ("null", "nothing"),
            ("~", "nothing"),
            ("", "nothing"),
            ("2024-01-01", "text"),
        ] {
            assert_eq!(entry(&one(&format!("a: {text}")), "a").node.value.kind(), kind, "{text}");
        }
    }

    #[test]
    fn json_is_read_as_yaml_is() {
        let node = one("{\n\t\"a\": [\"\\u00e4\\/\", 1, true, null],\n\t\"b\":{}\n}");
        let Value::List(items) = &entry(&node, "a").node.value else { panic!("{node:?}") };
        assert!(matches!(&items[0].value, Value::Text(text) if text == "ä/"), "{items:?}");
        assert_eq!(entry(&node, "b").line, 3);
    }

    #[test]
    fn a_zero_byte_does_not_end_the_text() {
        for text in ["a: 1\n\0b: 2\n", "a: 1\n# \0\n---\nb: 2\n", "{\"a\":\n1}\0", "a:\n  - \"\0\"\n"] {
            let (line, reason) = refusal(text);
            assert_eq!((line, reason.starts_with("has a zero byte")), (2, true), "{text:?}: {reason}");
        }
        assert!(parse("{\"a\": \"\\u0000\"}").is_ok(), "an escape is none");
    }

    fn refusal(text: &str) -> (u32, String) {
        let malformed = parse(text).expect_err(text);
        (malformed.line, malformed.reason)
    }

    #[test]
    fn what_is_too_large_or_too_deep_is_refused() {
        let deep = format!("a: {}{}", "[".repeat(MAX_DEPTH), "]".repeat(MAX_DEPTH));
        let documents = "a: 1\n---\n".repeat(MAX_DOCUMENTS + 1);
        for text in [deep, documents] {
            let (_, reason) = refusal(&text);
            assert!(reason.starts_with("more than a text may have"), "{reason}");
        }
        let deep = format!("a: {}{}", "[".repeat(MAX_DEPTH - 1), "]".repeat(MAX_DEPTH - 1));
        assert!(parse(&deep).is_ok());
        assert!(parse(&"[".repeat(100_000)).is_err());
    }

    fn chain(length: usize, anchor: impl Fn(&str) -> String) -> String {
        let line = |at: usize| match at {
            0 => "a0: &a0 [x]\n".to_owned(),
            _ => format!("a{at}: &a{at} {}\n", anchor(&format!("*a{}", at - 1))),
        };
        (0..length).map(line).collect()
    }

    #[test]
    fn aliases_that_grow_without_bounds_are_refused() {
        let wide = chain(7, |before| format!("[{}]", vec![before; 40].join(",")));
        let deep = chain(80, |before| format!("{}{before} {}", "[".repeat(40), "]".repeat(40)));
        for text in [wide.as_str(), deep.as_str(), "a: *b\n", "a: &a [*a]\n"] {
            let (_, reason) = refusal(text);
            assert!(reason.starts_with("an alias"), "{reason}");
        }
        assert!(parse(&format!("a: &a x\nb: [{}]", "*a,".repeat(MAX_ALIASES))).is_ok());
        assert!(parse(&format!("a: &a x\nb: [{}]", "*a,".repeat(MAX_ALIASES + 1))).is_err());
        assert!(parse(&chain(MAX_ALIAS_DEPTH, |before| format!("[{before}, {before}]"))).is_ok());
    }

    #[test]
    fn a_key_that_is_there_twice_is_refused() {
        for text in ["a: 1\nb: 2\na: 3\n", "{\"a\": 1,\n\"b\": 2,\n\"a\": 3}", "a: 1\nb: 2\n'a': 3\n"] {
            assert_eq!(refusal(text), (3, "the key \"a\" is there twice".to_owned()), "{text}");
        }
    }

    #[test]
    fn a_merge_key_is_refused() {
        assert_eq!(refusal("a: &a {b: 1}\nc:\n  <<: *a\n"), (3, "a merge key (`<<`) is not supported".to_owned()));
    }
}
