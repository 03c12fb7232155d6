//! The checks in order. Each leaves the cluster unchanged.

mod basic;
mod churn;
mod connectivity;
mod control_plane;
mod latency;
mod lifecycle;
mod policy;
mod removal;
mod rows;
mod samples;
mod services;

use anyhow::Result;

use super::cluster::Cluster;
use crate::args::KubernetesArgs;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    /// Returns a note for the table.
    pub(crate) run: fn(&Cluster<'_>) -> Result<String>,
    /// By other checks.
    needed: bool,
    /// No other check can follow.
    pub(crate) is_last: bool,
}

const fn check(name: &'static str, run: fn(&Cluster<'_>) -> Result<String>) -> Check {
    Check { name, run, needed: false, is_last: false }
}

const ALL: &[Check] = &[
    Check { name: "manifest: nodes become ready", run: basic::install, needed: true, is_last: false },
    Check { name: "pods of a Deployment have addresses", run: basic::addresses, needed: true, is_last: false },
    check("rights of wharf-kube", basic::rights),
    check("pods reach all pods", connectivity::pods),
    check("nodes reach all pods", connectivity::nodes),
    check("exec, logs, port-forward", basic::kubelet),
    check("probes", basic::probes),
    check("services by kube-proxy", services::cluster_addresses),
    check("hostPort", services::host_ports),
    check("policy: truth tables", policy::tables),
    check("policy: label changes", policy::labels),
    check("policy: egress to a service", services::egress),
    check("policy: from the object to packets", latency::policies),
    check("policy: from a pod's label to packets", latency::labels),
    check("StatefulSet whose pods are killed", lifecycle::stateful_set),
    check("rolling restart of Wharf", lifecycle::rolling_restart),
    check("cordon and drain", lifecycle::drain),
    check("node deleted and added, other pod CIDRs", lifecycle::node_again),
    check("API server killed", control_plane::api_server),
    check("etcd restored to an earlier state", control_plane::earlier_snapshot),
    check("programs killed during churn", churn::churn),
    Check { name: "deleted pods leave nothing", run: removal::pods, needed: false, is_last: true },
    Check { name: "uninstall leaves nothing", run: removal::wharf, needed: false, is_last: true },
];

pub(crate) fn all(arguments: &KubernetesArgs) -> Vec<Check> {
    let chosen = |check: &&Check| {
        let names = &arguments.checks;
        check.needed || names.is_empty() || names.iter().any(|name| check.name.contains(name.as_str()))
    };
    ALL.iter().filter(chosen).copied().collect()
}
