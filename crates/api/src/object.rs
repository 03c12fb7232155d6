//! Deserialization from JSON objects only.
//!
//! serde's derived `Deserialize` also reads structs from arrays by position, but the API promises no field order.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};

/// A struct read from a JSON object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfMap<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OfMap<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(OfMap(PhantomData))
    }
}

/// A list of objects, for `#[serde(deserialize_with)]`.
///
/// # Errors
/// The deserializer's errors, or an element that is not an object.
pub fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    Ok(Vec::<Object<T>>::deserialize(deserializer)?.into_iter().map(|o| o.0).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GcAttachment, GcRequest, IpamAllocate};

    #[test]
    fn an_array_is_no_object() {
        let array = serde_json::from_str::<Object<IpamAllocate>>(r#"[null, null, "me"]"#);
        assert!(array.is_err_and(|e| e.to_string().contains("expected an object")));
        let object = serde_json::from_str::<Object<IpamAllocate>>(r#"{"owner": "me"}"#);
        assert!(object.is_ok_and(|o| o.0.owner == "me"));
    }

    #[test]
    fn nor_is_one_inside_another() {
        let nested = serde_json::from_str::<Object<GcRequest>>(r#"{"network": "n", "valid": [["c", "eth0"]]}"#);
        assert!(nested.is_err());
        let good = r#"{"network": "n", "valid": [{"container_id": "c", "ifname": "eth0"}]}"#;
        let wanted = vec![GcAttachment { container_id: "c".into(), ifname: "eth0".into() }];
        assert!(serde_json::from_str::<Object<GcRequest>>(good).is_ok_and(|o| o.0.valid == wanted));
    }

    #[test]
    fn unknown_fields_are_still_refused() {
        assert!(serde_json::from_str::<Object<IpamAllocate>>(r#"{"owner": "me", "x": 1}"#).is_err());
    }
}
