//! Policies, labels of namespaces, and what must come of them: rows in the kernel that say what an engine says that was
//! just made.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use wharf_agent::policy::error::PolicyError;
use wharf_common::{
    CellKey, SetsRow,
    flow::{ICMP, ICMPV6, SCTP, TCP, UDP, UNKNOWN_TRANSPORT},
    policy::{ACCEPT, Choice, PORT_UNKNOWN},
};
use wharf_core::{ids::EndpointId, kernel::PolicyKernel as _, policy::PolicyRows};
use wharf_datapath::fake::Operation as Op;
use wharf_policy::{
    compile::{EndpointKey, Event, Identity, Limits, Member, Tables, compile},
    model::{self, Direction, Labels, NAMESPACE_NAME, Policy, PolicyName, Protocol},
    oracle::Destination,
    read::read,
};

use super::{Outcome, Play};
use crate::{
    expected::{Endpoint, Health},
    history::{self, Amid, PolicyStep, Trouble},
};

/// Every document in two versions, with its kind and name.
const DOCUMENTS: [(&str, &str, [&str; 2]); history::DOCUMENTS] = [
    (
        "NetworkPolicy",
        "web",
        [
            "{podSelector: {matchLabels: {app: web}}, policyTypes: [Ingress]}",
            "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: l0}}}],
              ports: [{port: 80}, {protocol: UDP, port: 1000, endPort: 2000}]}]}",
        ],
    ),
    (
        "NetworkPolicy",
        "l1",
        [
            "{podSelector: {matchLabels: {app: l1}}, policyTypes: [Ingress, Egress]}",
            "{podSelector: {matchExpressions: [{key: app, operator: In, values: [l1, l2]}]}, policyTypes: [Egress],
              egress: [{to: [{ipBlock: {cidr: 10.88.0.0/29, except: [10.88.0.4/31]}}]},
                {to: [{ipBlock: {cidr: 192.0.2.0/24}}], ports: [{port: 443}]}]}",
        ],
    ),
    (
        "CiliumClusterwideNetworkPolicy",
        "dark",
        [
            "{endpointSelector: {matchLabels: {'k8s:io.cilium.k8s.namespace.labels.light': 'off'}}, ingress: [{}]}",
            "{endpointSelector: {}, ingressDeny: [{fromEndpoints: [{matchLabels: {'k8s:app': l0}}],
              toPorts: [{ports: [{port: '80', protocol: TCP}]}]}], enableDefaultDeny: {ingress: false, egress: false}}",
        ],
    ),
    (
        "ClusterNetworkPolicy",
        "admin",
        [
            "{tier: Admin, priority: 10, subject: {namespaces: {}}, ingress: [
              {action: Pass, from: [{namespaces: {matchLabels: {light: 'off'}}}]},
              {action: Deny, from: [{namespaces: {}}], protocols: [{tcp: {destinationPort: {number: 80}}}]}]}",
            "{tier: Baseline, priority: 0, subject: {namespaces: {}}, egress: [
              {action: Deny, to: [{networks: [192.0.2.0/25]}]}]}",
        ],
    ),
];

fn version_of(kind: &str) -> &'static str {
    match kind {
        "NetworkPolicy" => "networking.k8s.io/v1",
        "ClusterNetworkPolicy" => "policy.networking.k8s.io/v1alpha2",
        _ => "cilium.io/v2",
    }
}

fn text(document: usize, version: usize) -> String {
    let (kind, name, specs) = DOCUMENTS[document];
    format!("apiVersion: {}\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {}\n", version_of(kind), specs[version])
}

fn name_of(document: usize) -> PolicyName {
    let [policy] = &read("model.yaml", &text(document, 0)).expect("policies")[..] else { panic!("one policy") };
    policy.name.clone()
}

/// What is wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Documents {
    /// The version of each document that is there.
    documents: BTreeMap<usize, usize>,
    /// Labels of the namespace that all containers are in.
    light: Option<bool>,
    revision: u64,
}

impl Documents {
    /// What follows from a change; `None` where it is refused, because there is nothing to change.
    fn after(&self, step: PolicyStep) -> Option<Self> {
        let mut wanted = self.clone();
        let changes = match step {
            PolicyStep::Import { document, version } => {
                wanted.documents.insert(document, version);
                true
            }
            PolicyStep::Delete { document } => {
                wanted.documents.remove(&document)?;
                true
            }
            PolicyStep::DeleteAll => !std::mem::take(&mut wanted.documents).is_empty(),
            PolicyStep::Namespace { light: None } => {
                wanted.light.take()?;
                true
            }
            PolicyStep::Namespace { light } => std::mem::replace(&mut wanted.light, light) != light,
        };
        wanted.revision += u64::from(changes);
        Some(wanted)
    }

    fn policies(&self) -> Vec<Policy> {
        let all = self.documents.iter().map(|(document, version)| text(*document, *version));
        all.flat_map(|text| read("model.yaml", &text).expect("policies")).collect()
    }

    fn namespace(&self) -> Labels {
        let light = self.light.map(|on| ("light".to_owned(), if on { "on" } else { "off" }.to_owned()));
        light.into_iter().chain([(NAMESPACE_NAME.to_owned(), "default".to_owned())]).collect()
    }
}

impl Play {
    pub(super) fn policy(&mut self, step: PolicyStep, amid: Amid) {
        let kernel = self.machine.kernel.clone();
        let after = self.wanted.after(step);
        let trouble = match amid {
            Amid::Nothing => Trouble::None,
            Amid::RefusedAt(row, kind) | Amid::DiesAtRow(row, kind) => {
                kernel.fail_policy_at(row, kind);
                Trouble::None
            }
            Amid::KilledAt(at) => Trouble::KilledAt(at),
            Amid::CallerGone => Trouble::CallerGone(Op::ChangePolicy),
        };
        let outcome = self.disturb(trouble, |agent| {
            let life = agent.life.clone();
            tokio::spawn(async move {
                let policy = &life.policy;
                match step {
                    PolicyStep::Import { document, version } => {
                        policy.import("model.yaml", &text(document, version)).await.map(drop)
                    }
                    PolicyStep::Delete { document } => policy.delete(&name_of(document)).await.map(drop),
                    PolicyStep::DeleteAll => policy.delete_all().await.map(drop),
                    PolicyStep::Namespace { light } => {
                        let labels =
                            light.map(|on| [("light".to_owned(), if on { "on" } else { "off" }.to_owned())].into());
                        policy.set_namespace("default", labels).await.map(drop)
                    }
                }
            })
        });
        // A change of fewer rows did not come to the row at which it was to fail.
        kernel.fail_policy_at(usize::MAX, wharf_core::kernel::KernelErrorKind::Other);
        match outcome {
            Outcome::Answered(result) => {
                match (&after, &result) {
                    (None, Err(PolicyError::Unknown { .. } | PolicyError::UnknownNamespace(_))) | (Some(_), Ok(())) => {
                    }
                    (Some(_), Err(PolicyError::Kernel(_))) if !matches!(amid, Amid::Nothing) => {}
                    _ => panic!("{step:?} amid {amid:?}: {result:?}"),
                }
                self.wanted = after.unwrap_or_else(|| self.wanted.clone());
                if let Amid::DiesAtRow(..) = amid {
                    self.restart(None);
                }
            }
            // Kept is what is wanted before the kernel has it.
            Outcome::Unheard => self.wanted = after.unwrap_or_else(|| self.wanted.clone()),
            Outcome::Killed => {
                let mut model = self.model.clone();
                model.start(false);
                self.one_of(vec![model]);
                let kept = self.run(self.life().agent.life.policy.list()).revision;
                let all = [Some(self.wanted.clone()), after];
                let mut all = all.into_iter().flatten().filter(|wanted| wanted.revision == kept);
                self.wanted = all.next().expect("the old policies are in force, or the new ones");
            }
        }
    }

    /// The controller's work, where the kernel refused rows or a caller went away over them.
    pub(super) fn ensure_policy(&self) {
        self.run(self.settled());
        let told = self.run(self.life().agent.life.policy.list());
        let ensured = self.run(self.life().agent.life.policy.ensure());
        ensured.unwrap_or_else(|why| panic!("{why}; before: {:?}", told.problem));
    }

    /// What is wanted is known, and is in force.
    pub(super) fn policy_is_in_force(&self) {
        let list = self.run(self.life().agent.life.policy.list());
        assert_eq!((list.revision, list.problem), (self.wanted.revision, None));
        assert_eq!(list.realized, list.revision, "revision that is in force");
        let names: BTreeSet<String> = list.policies.into_iter().map(|policy| policy.name).collect();
        let wanted = self.wanted.documents.keys().map(|document| DOCUMENTS[*document].1.to_owned());
        assert_eq!(names, wanted.collect());
        self.kernel_has_the_rows_of_policy();
    }

    fn kernel_has_the_rows_of_policy(&self) {
        let rows = self.machine.kernel.policy().0;
        if rows.generation == 0 {
            assert_eq!((rows, self.wanted.documents.len()), (PolicyRows::default(), 0), "rows without policies");
            return;
        }
        if self.model.is_murky() {
            return;
        }
        // One whose delete has not ended has its rows, or has them no more.
        let there = |e: &&Endpoint| {
            !matches!(e.health, Health::Going { .. })
                || e.addresses.iter().any(|ip| rows.peers.contains_key(&ipnet::IpNet::from(*ip)))
        };
        let endpoints: Vec<&Endpoint> = self.model.endpoints.values().filter(there).collect();
        let node = self.run(self.machine.kernel.observe_addresses()).expect("addresses").into_iter().collect();
        let fresh = fresh(&self.wanted, &endpoints, node);
        assert_eq!(rows.peers.keys().collect::<Vec<_>>(), fresh.ipcache.keys().collect::<Vec<_>>(), "peers");
        let sets = fresh.sets.iter().map(|(key, sets)| (key.0, (sets.ingress.0 != 0, sets.egress.0 != 0)));
        let of_kernel = rows.sets.iter().map(|(id, sets)| (id.get().into(), (sets.ingress != 0, sets.egress != 0)));
        let of_kernel: BTreeMap<u32, _> = of_kernel.collect();
        assert_eq!(of_kernel, sets.filter(|(_, of)| *of != (false, false)).collect(), "rule sets of endpoints");
        let sizes = fresh.sizes();
        assert_eq!((rows.ports.len(), rows.cells.len()), (sizes.ports, sizes.rules), "rows of rule sets");
        let addresses = endpoints.iter().flat_map(|e| e.addresses.iter().copied());
        let strangers = ["10.88.0.6", "192.0.2.1", "192.0.2.200", "198.51.100.1", "2001:db8::1"];
        let peers: BTreeSet<IpAddr> = addresses.chain(strangers.map(|ip| ip.parse().expect("an address"))).collect();
        for e in &endpoints {
            for (direction, peer, to) in flows(&peers) {
                let decision = fresh.decide(EndpointKey(e.id.get().into()), direction, peer, to).expect("it is there");
                let verdict = passes(&rows, e.id, direction, peer, to);
                assert_eq!(verdict, decision.accept, "endpoint {} {direction:?} {peer} {to:?}: {rows:?}", e.id);
            }
        }
    }
}

/// Flows that the documents tell apart.
fn flows(peers: &BTreeSet<IpAddr>) -> impl Iterator<Item = (Direction, IpAddr, Destination)> {
    let tcp = |port| Destination::Ports { protocol: Protocol::Tcp, port };
    let udp = |port| Destination::Ports { protocol: Protocol::Udp, port };
    let portless = [Destination::Other(47), Destination::Unknown];
    let all = [tcp(80), tcp(443), tcp(81), udp(1000), udp(2000), udp(2001)].into_iter().chain(portless);
    let to = move |peer| all.clone().map(move |to| (peer, to));
    let both = |(peer, to)| [(Direction::Ingress, peer, to), (Direction::Egress, peer, to)];
    peers.iter().copied().flat_map(to).flat_map(both)
}

/// The tables of an engine that knows nothing else.
fn fresh(wanted: &Documents, endpoints: &[&Endpoint], node: BTreeSet<IpAddr>) -> Tables {
    let mut numbers: BTreeMap<Labels, u32> = BTreeMap::new();
    let mut events = vec![Event::Node(node)];
    events.extend(wanted.policies().into_iter().map(Event::Policy));
    for e in endpoints {
        let labels: Labels = e.labels.iter().map(|l| (format!("{}:{}", l.source, l.key), l.value.clone())).collect();
        let next = u32::try_from(numbers.len()).expect("few labels") + 1;
        let identity = Identity(*numbers.entry(labels.clone()).or_insert(next));
        let endpoint = model::Endpoint {
            addresses: e.addresses.clone().into(),
            labels: labels.into(),
            namespace: Some(wanted.namespace().into()),
            ..model::Endpoint::default()
        };
        events.push(Event::Endpoint(EndpointKey(e.id.get().into()), Member { identity, endpoint: endpoint.into() }));
    }
    let most = usize::MAX;
    compile(events, Limits { ipcache: most, ports: most, rules: most, sets: most, listeners: most }).expect("it fits")
}

/// What the programs make of a packet by these rows.
fn passes(rows: &PolicyRows, id: EndpointId, direction: Direction, peer: IpAddr, to: Destination) -> bool {
    let SetsRow { ingress, egress } = rows.sets.get(&id).copied().unwrap_or_default();
    let set = if direction == Direction::Ingress { ingress } else { egress };
    if set == 0 {
        return true;
    }
    let class = rows.peers.iter().filter(|(net, _)| net.contains(&peer)).max_by_key(|(net, _)| net.prefix_len());
    let class = class.expect("every address has a class").1.class;
    let (protocol, port) = match to {
        Destination::Ports { protocol: Protocol::Tcp, port } => (TCP, port),
        Destination::Ports { protocol: Protocol::Udp, port } => (UDP, port),
        Destination::Ports { protocol: Protocol::Sctp, port } => (SCTP, port),
        Destination::Icmp { v6, kind } => (if v6 { ICMPV6 } else { ICMP }, kind.into()),
        Destination::Other(protocol) => (protocol, 0),
        Destination::Unknown => (UNKNOWN_TRANSPORT, 0),
    };
    let covers = |first: u16, length: u8| u32::from(first ^ port) >> (16 - u32::from(length)) == 0;
    let ports = rows.ports.iter().filter(|(r, _)| (r.set, r.protocol) == (set, protocol) && covers(r.first, r.length));
    let port = match ports.max_by_key(|(range, _)| range.length) {
        _ if protocol == UNKNOWN_TRANSPORT => PORT_UNKNOWN,
        Some((_, class)) => *class,
        None => 0,
    };
    let mut choice = Choice::NONE;
    for (class, port) in [(class, port), (class, 0), (0, port), (0, 0)] {
        if let Some((cell, _)) = rows.cells.get(&CellKey { set, class, port }) {
            choice.add(cell.admin, cell.rest);
        }
    }
    choice.decides().ruling == ACCEPT
}
