//! Steps of a history with the real programs. Silent connections take half a minute each: only the in-process histories
//! of `kube/tests` have them.

use std::{thread, time::Duration};

use anyhow::{Context, Result};
use proptest::prelude::*;
use serde_json::{Value, json};
use wharf_kube::source::Source;
use wharf_tests::{
    cluster::NAMES,
    kube::{
        objects::{self, key, namespace},
        server::Fault,
        streams::WatchFault,
    },
};

use crate::pair::{NODES, Pair, node_object};

#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Name, uid, label.
    Pod(u8, u8, u8),
    EndPod(u8),
    /// Kind and name.
    Put(u8, u8),
    Delete(u8, u8),
    /// The node's object is deleted and created again, without annotations.
    NodeAgain(usize),
    Fail(u8, Fault),
    Watches(WatchFault),
    Compact,
    Snapshot,
    Restore(u8),
    Shuffle,
    Page(u8),
    Rotate,
    KillProgram(usize),
    KillAgent(usize),
    /// Both, as a restart of the node's pod.
    KillBoth(usize),
    /// Milliseconds.
    Wait(u16),
}

/// Targets of [`Step::Fail`].
const TARGETS: [&str; 6] = ["/api/v1/pods", "/networkpolicies", "watch=true", "limit=", "continue=", "/"];
/// Nodes of pods, by the pod's name.
const PLACES: [&str; 6] = ["a", "a", "b", "b", "o0", "o0"];
/// Versions that other resources take after the first snapshot of a history. Each later snapshot or restore takes half as
/// many, so the versions after a restore stay below the versions of the earlier watches, and the server refuses those.
const GAP: u64 = 1 << 40;

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let codes = prop::sample::select(vec![401, 403, 410, 429, 500, 503, 504]);
    let fault = prop_oneof![
        3 => codes.prop_map(|code| Fault::Status(code, None)),
        2 => Just(Fault::Reset),
        1 => Just(Fault::Cut),
        1 => Just(Fault::Garbage),
    ];
    let watches = vec![
        WatchFault::End,
        WatchFault::Cut,
        WatchFault::Truncate,
        WatchFault::Error(410),
        WatchFault::Error(504),
        WatchFault::Garbage,
    ];
    prop_oneof![
        12 => (0_u8..6, 0_u8..3, 0_u8..4).prop_map(|(name, uid, label)| Step::Pod(name, uid, label)),
        2 => (0_u8..6).prop_map(Step::EndPod),
        10 => (0_u8..4, 0_u8..3).prop_map(|(kind, name)| Step::Put(kind, name)),
        6 => (0_u8..5, 0_u8..6).prop_map(|(kind, name)| Step::Delete(kind, name)),
        1 => (0..NODES).prop_map(Step::NodeAgain),
        4 => (0_u8..6, fault).prop_map(|(target, fault)| Step::Fail(target, fault)),
        2 => prop::sample::select(watches).prop_map(Step::Watches),
        1 => Just(Step::Compact),
        3 => Just(Step::Snapshot),
        2 => any::<u8>().prop_map(Step::Restore),
        1 => Just(Step::Shuffle),
        1 => (1_u8..5).prop_map(Step::Page),
        1 => Just(Step::Rotate),
        1 => (0..NODES).prop_map(Step::KillProgram),
        1 => (0..NODES).prop_map(Step::KillAgent),
        1 => (0..NODES).prop_map(Step::KillBoth),
        6 => (1_u16..150).prop_map(Step::Wait),
    ]
}

fn pod(name: u8, uid: u8, label: u8) -> (Source, Value) {
    let place = PLACES.get(usize::from(name)).copied().unwrap_or(PLACES[0]);
    let (source, mut pod) = objects::pod(&format!("p{name}"), &format!("u{name}-{uid}"), None, &format!("l{label}"));
    pod["spec"]["nodeName"] = json!(place);
    if label > 0 {
        let (network, host) = (NAMES.iter().position(|name| *name == place), 20 + name * 3 + uid);
        let addresses = match network {
            Some(n) => [format!("10.87.{n}.{host}"), format!("fd87:0:0:{}::{host:x}", n + 1)],
            None => [format!("10.86.0.{host}"), format!("fd86::{host:x}")],
        };
        pod["status"] = json!({
            "phase": "Running", "podIP": addresses[0], "podIPs": addresses.map(|address| json!({"ip": address})),
        });
    }
    (source, pod)
}

fn other(kind: u8, name: u8, content: u64) -> (Source, Value) {
    let (uid, name_of) = (format!("k{kind}-{name}"), format!("o{name}"));
    let app = |number: u64| json!({"matchLabels": {"app": format!("l{number}")}});
    let rules = |count: u64, peer: &dyn Fn(Value) -> Value| (0..count).map(|n| peer(app(n))).collect::<Vec<_>>();
    let (ingress, egress) = (1 + content % 3, content / 3 % 3);
    let (source, spec) = match kind {
        0 => {
            // On the nodes' switch, or behind the router.
            let network = if content.is_multiple_of(2) { "198.51.100" } else { "192.0.2" };
            let cidr = format!("10.{}.{name}.0/24", 100 + content % 100);
            return objects::node(&name_of, &format!("{network}.{}", 20 + name), &cidr);
        }
        1 => return namespace(["shop", "o1", "o2"].get(usize::from(name)).unwrap_or(&"shop"), &content.to_string()),
        2 => {
            let from = |peer: Value| json!({"from": [{"podSelector": peer}]});
            let to = |peer: Value| json!({"to": [{"podSelector": peer}]});
            let (ingress, egress) = (rules(ingress, &from), rules(egress, &to));
            let types = ["Ingress", "Egress"];
            let spec =
                json!({"podSelector": app(content % 4), "policyTypes": types, "ingress": ingress, "egress": egress});
            (Source::NetworkPolicy, spec)
        }
        _ => {
            let from = |peer: Value| json!({"fromEndpoints": [peer]});
            let to = |peer: Value| json!({"toEndpoints": [peer]});
            let (ingress, egress) = (rules(ingress, &from), rules(egress, &to));
            let spec = json!({"endpointSelector": app(content % 4), "ingress": ingress, "egress": egress});
            (Source::CiliumNetworkPolicy, spec)
        }
    };
    (source, json!({"metadata": {"name": name_of, "namespace": "shop", "uid": uid}, "spec": spec}))
}

/// A history on a pair whose earlier histories have ended.
pub(crate) struct Play<'a> {
    pair: &'a mut Pair,
    /// Differs for each change.
    content: u64,
    snapshots: Vec<u64>,
    gap: u64,
}

impl<'a> Play<'a> {
    pub(crate) fn new(pair: &'a mut Pair) -> Self {
        Self { pair, content: 0, snapshots: Vec::new(), gap: GAP }
    }

    pub(crate) fn step(&mut self, step: &Step) -> Result<()> {
        self.content += 1;
        let server = self.pair.server.clone();
        let pair = &mut *self.pair;
        match *step {
            Step::Pod(name, uid, label) => server.put(pod(name, uid, label)),
            Step::EndPod(name) => {
                if let Some(mut pod) = server.object(Source::Pod, &format!("shop/p{name}")) {
                    pod["status"]["phase"] = json!("Failed");
                    server.put((Source::Pod, pod));
                }
            }
            Step::Put(kind, name) => server.put(other(kind, name, self.content)),
            Step::Delete(4.., name) => server.delete(Source::Pod, &format!("shop/p{name}")),
            Step::Delete(kind, name) => {
                let (source, object) = other(kind, name % 3, 0);
                server.delete(source, &key(&object));
            }
            Step::NodeAgain(n) => {
                server.delete(Source::Node, NAMES[n]);
                server.put(node_object(n));
            }
            Step::Fail(target, fault) => server.fail(TARGETS.get(usize::from(target)).context("a target")?, fault),
            Step::Watches(fault) => server.break_watches(fault),
            Step::Compact => server.compact(),
            Step::Snapshot => {
                self.snapshots.push(server.snapshot());
                server.advance(self.gap);
                self.gap /= 2;
            }
            Step::Restore(which) => {
                if !self.snapshots.is_empty() {
                    // Later snapshots belong to the history that is gone.
                    self.snapshots.truncate(usize::from(which) % self.snapshots.len() + 1);
                    let version = self.snapshots.last().copied().context("a snapshot")?;
                    server.break_watches(WatchFault::Cut);
                    server.restore(version);
                    server.advance(self.gap);
                    self.gap /= 2;
                }
            }
            Step::Shuffle => server.shuffle(),
            Step::Page(objects) => server.set_page(usize::from(objects)),
            Step::Rotate => pair.rotate()?,
            Step::KillProgram(n) => {
                pair.kill_program(n);
                pair.start_program(n)?;
            }
            Step::KillAgent(n) => {
                pair.kill_agent(n)?;
                pair.start_agent(n)?;
            }
            Step::KillBoth(n) => {
                pair.kill_program(n);
                pair.kill_agent(n)?;
                pair.start_program(n)?;
                pair.start_agent(n)?;
            }
            Step::Wait(millis) => thread::sleep(Duration::from_millis(millis.into())),
        }
        Ok(())
    }
}
