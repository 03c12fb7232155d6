//! Kubernetes API through kubectl.

use std::{path::PathBuf, process::Command, time::Duration};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::place::{Place, said, said_with, until};

#[derive(Debug)]
pub(crate) struct Api {
    pub(crate) place: Place,
    kubectl: PathBuf,
    kubeconfig: String,
}

impl Api {
    pub(crate) fn new(place: Place, kubectl: PathBuf, kubeconfig: String) -> Self {
        Self { place, kubectl, kubeconfig }
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let words = self.words(arguments);
        let mut command = self.place.command("env");
        command.args(words);
        command
    }

    /// kubectl's command line inside of the place.
    pub(crate) fn words(&self, arguments: &[&str]) -> Vec<String> {
        let kubectl = self.kubectl.display().to_string();
        // By default below the home directory.
        let mut words =
            vec![kubectl, format!("--kubeconfig={}", self.kubeconfig), "--cache-dir=/run/kubectl".to_owned()];
        words.extend(arguments.iter().map(|word| (*word).to_owned()));
        words
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Result<String> {
        said(&mut self.command(arguments))
    }

    pub(crate) fn get(&self, arguments: &[&str]) -> Result<Value> {
        let mut all = vec!["get", "--output=json"];
        all.extend(arguments);
        serde_json::from_str(&self.run(&all)?).with_context(|| format!("read the answer to get {arguments:?}"))
    }

    pub(crate) fn list(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        Ok(self.get(arguments)?.get("items").and_then(Value::as_array).cloned().unwrap_or_default())
    }

    pub(crate) fn apply(&self, objects: &[Value]) -> Result<()> {
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string();
        said_with(&mut self.command(&["apply", "--filename=-"]), list.as_bytes()).map(drop)
    }

    /// Waits until the objects are gone.
    pub(crate) fn delete(&self, arguments: &[&str]) -> Result<()> {
        let mut all = vec!["delete", "--ignore-not-found", "--timeout=120s"];
        all.extend(arguments);
        self.run(&all).map(drop)
    }

    pub(crate) fn script(&self, pod: &Pod, script: &str, words: &[&str]) -> Result<String> {
        let namespace = format!("--namespace={}", pod.namespace);
        let mut all = vec!["exec", &namespace, &pod.name, "--", "sh", "-c", script, "script"];
        all.extend(words);
        self.run(&all)
    }

    /// Waits for a workload such as `deployment/web`.
    pub(crate) fn rolled_out(&self, namespace: &str, workload: &str, limit: Duration) -> Result<()> {
        let (namespace, limit) = (format!("--namespace={namespace}"), format!("--timeout={}s", limit.as_secs()));
        self.run(&["rollout", "status", &namespace, workload, &limit]).map(drop)
    }

    /// Running pods of a label selector; an empty `namespace` means all.
    pub(crate) fn pods(&self, namespace: &str, selector: &str) -> Result<Vec<Pod>> {
        let namespace =
            if namespace.is_empty() { "--all-namespaces".to_owned() } else { format!("--namespace={namespace}") };
        let list = self.list(&["pods", &namespace, "--selector", selector])?;
        Ok(list.iter().filter_map(Pod::of).collect())
    }

    pub(crate) fn no_pods(&self, namespace: &str, selector: &str, limit: Duration) -> Result<()> {
        let namespace = format!("--namespace={namespace}");
        until(&format!("no pods {selector} in {namespace}"), limit, || {
            let list = self.list(&["pods", &namespace, "--selector", selector])?;
            Ok(list.is_empty().then_some(()))
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) node: String,
    pub(crate) addresses: Vec<String>,
}

impl Pod {
    fn of(object: &Value) -> Option<Self> {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        if object.pointer("/metadata/deletionTimestamp").is_some() || text("/status/phase")? != "Running" {
            return None;
        }
        let addresses = object.pointer("/status/podIPs")?.as_array()?;
        let addresses = addresses.iter().filter_map(|entry| entry.get("ip")?.as_str().map(str::to_owned)).collect();
        Some(Self {
            namespace: text("/metadata/namespace")?,
            name: text("/metadata/name")?,
            node: text("/spec/nodeName")?,
            addresses,
        })
    }
}

pub(crate) fn in_url(address: &str) -> String {
    if address.contains(':') { format!("[{address}]") } else { address.to_owned() }
}

/// At a JSON pointer; empty if absent.
pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

pub(crate) fn elements<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object.pointer(pointer).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_do_not_run_or_end_are_left_out() {
        let pod = |phase: &str, more: Value| {
            let mut metadata = json!({"namespace": "n", "name": "p"});
            if let (Some(to), Some(from)) = (metadata.as_object_mut(), more.as_object()) {
                to.extend(from.clone());
            }
            let status = json!({"phase": phase, "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]});
            Pod::of(&json!({"metadata": metadata, "spec": {"nodeName": "a"}, "status": status}))
        };
        assert_eq!(pod("Running", json!({})).map(|pod| pod.addresses.len()), Some(2));
        assert_eq!(pod("Pending", json!({})), None);
        assert_eq!(pod("Running", json!({"deletionTimestamp": "now"})), None);
        assert_eq!([in_url("10.0.0.1"), in_url("fd00::1")], ["10.0.0.1", "[fd00::1]"]);
    }
}
