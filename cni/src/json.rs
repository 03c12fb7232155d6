//! Typed access to JSON objects; errors name the key's path and both types. CNI requires that unknown keys are ignored.
//! `null` means absent: Go programs send it for empty lists and maps.

use serde_json::{Map, Value};

use crate::fault::Fault;

#[derive(Debug, Clone)]
pub(crate) struct Object<'a> {
    path: String,
    map: &'a Map<String, Value>,
    any_case: bool,
}

impl<'a> Object<'a> {
    pub(crate) fn root(map: &'a Map<String, Value>) -> Self {
        Self { path: String::new(), map, any_case: false }
    }

    pub(crate) fn at(path: String, value: &'a Value) -> Result<Self, Fault> {
        match value {
            Value::Object(map) => Ok(Self { path, map, any_case: false }),
            other => Err(mismatch(&path, "an object", other)),
        }
    }

    /// Fallback for containerd's `HostPort` and `IngressRate` (github.com/containerd/go-cni, namespace opts).
    pub(crate) fn in_any_case(self) -> Self {
        Self { any_case: true, ..self }
    }

    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    pub(crate) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(crate) fn has_key(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        let value = match self.map.get(key) {
            None if self.any_case => {
                self.map.iter().find(|(there, _)| there.eq_ignore_ascii_case(key)).map(|(_, value)| value)
            }
            exact => exact,
        };
        value.filter(|value| !value.is_null())
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Object<'a>>, Fault> {
        self.value(key).map(|value| Object::at(self.path_of(key), value)).transpose()
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, Fault> {
        self.value(key).map(|value| text(&self.path_of(key), value)).transpose()
    }

    pub(crate) fn required_string(&self, key: &str) -> Result<&'a str, Fault> {
        match self.string(key)? {
            Some(text) if !text.is_empty() => Ok(text),
            _ => Err(Fault::config(format!("netconf: key {:?} is missing or empty", self.path_of(key)))),
        }
    }

    pub(crate) fn u32(&self, key: &str) -> Result<Option<u32>, Fault> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_u64().map(u32::try_from) {
            Some(Ok(n)) => Ok(Some(n)),
            _ => Err(mismatch(&self.path_of(key), "a whole number from 0 to 4294967295", value)),
        }
    }

    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>, Fault> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| mismatch(&self.path_of(key), "true or false", value))
    }

    pub(crate) fn u64(&self, key: &str) -> Result<Option<u64>, Fault> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let wanted = "a whole number from 0 to 18446744073709551615";
        value.as_u64().map(Some).ok_or_else(|| mismatch(&self.path_of(key), wanted, value))
    }

    pub(crate) fn list(&self, key: &str) -> Result<Vec<(String, &'a Value)>, Fault> {
        match self.value(key) {
            None => Ok(Vec::new()),
            Some(Value::Array(items)) => {
                let path = self.path_of(key);
                Ok(items.iter().enumerate().map(|(i, item)| (format!("{path}[{i}]"), item)).collect())
            }
            Some(other) => Err(mismatch(&self.path_of(key), "a list", other)),
        }
    }

    pub(crate) fn strings(&self, key: &str) -> Result<Vec<String>, Fault> {
        self.list(key)?.iter().map(|(path, item)| text(path, item).map(str::to_owned)).collect()
    }
}

pub(crate) fn text<'a>(path: &str, value: &'a Value) -> Result<&'a str, Fault> {
    value.as_str().ok_or_else(|| mismatch(path, "a string", value))
}

fn mismatch(path: &str, wanted: &str, found: &Value) -> Fault {
    let found = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(b) => format!("{b}"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) => format!("the string {:?}", s.chars().take(40).collect::<String>()),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    Fault::config(format!("netconf: key {path:?} must be {wanted}, not {found}"))
}
