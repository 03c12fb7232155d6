//! Patches of the scripted API server.

use serde_json::{Value, json};

/// RFC 7386.
pub fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().expect("an object").remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

/// A strategic merge of the conditions of a node.
pub fn merge_conditions(node: &mut Value, patch: &Value) {
    for condition in patch["status"]["conditions"].as_array().expect("conditions") {
        let all = &mut node["status"]["conditions"];
        if all.is_null() {
            *all = json!([]);
        }
        let all = all.as_array_mut().expect("a list");
        match all.iter_mut().find(|found| found["type"] == condition["type"]) {
            Some(found) => merge(found, condition),
            None => all.push(condition.clone()),
        }
    }
}
