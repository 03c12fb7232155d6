//! Network policy: what is in force, what decides about a packet, and the labels of namespaces.
//!
//! A revision is the number of a state of the policies, from 1; each change of the policies or of a namespace's labels
//! makes the next one. 0 is the state of an agent that was never given a policy.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{PolicyEnforcement, PolicyRedirect};

/// Longest text of a [`PolicyImport`], bytes.
pub const POLICY_TEXT_MOST: usize = 4 << 20;
/// Most prefixes that a [`PolicyRow`] names.
pub const POLICY_ROW_PEERS_MOST: usize = 16;

/// Body of `GET /v1/policy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyList {
    /// Revision that the agent has taken.
    pub revision: u64,
    /// Revision whose rows are in the kernel; never above `revision`.
    pub realized: u64,
    /// When policy is enforced.
    pub enforcement: PolicyEnforcement,
    /// Packets that policy would drop pass, and are only counted.
    pub audit: bool,
    /// Why `realized` is below `revision`, or why a file of the policy directory is refused: operation, subject, cause.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Fill of the tables in the kernel.
    pub rows: PolicySizes,
    /// Policies by kind, namespace and name; a document with several `specs` has an element for each.
    pub policies: Vec<PolicyInfo>,
}

/// Rows of policy's tables in the kernel, and how many fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicySizes {
    /// Prefixes whose class of peers is known: addresses of endpoints, and networks that rules name.
    pub peers: u64,
    /// Limit of `peers`.
    pub peers_limit: u64,
    /// Prefixes of ports, of all rule sets.
    pub ports: u64,
    /// Limit of `ports`.
    pub ports_limit: u64,
    /// Pairs of a class of peers and a class of ports, of all rule sets.
    pub cells: u64,
    /// Limit of `cells`.
    pub cells_limit: u64,
    /// Rule sets, each of one direction; endpoints with the same rules share one.
    pub sets: u64,
    /// Limit of `sets`.
    pub sets_limit: u64,
}

/// A policy that the agent has taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyInfo {
    /// `NetworkPolicy`, `ClusterNetworkPolicy`, `CiliumNetworkPolicy` or `CiliumClusterwideNetworkPolicy`.
    #[schema(example = "NetworkPolicy")]
    pub kind: String,
    /// Namespace; absent for kinds without namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
    /// When it decides: `admin`, `namespaced` or `baseline`.
    #[schema(example = "namespaced")]
    pub tier: String,
    /// Within the tier, lower first, 0 to 1,000; absent in the namespaced tier, which has no order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u16>,
    /// The endpoints that it is about, in words.
    pub subject: String,
    /// Directions in which its subjects accept only what a rule accepts: `ingress`, `egress`.
    pub isolates: Vec<String>,
    /// Rules about packets to its subjects.
    pub ingress_rules: u64,
    /// Rules about packets from its subjects.
    pub egress_rules: u64,
    /// Where it was written: the file that an import named, or one of the policy directory.
    pub file: String,
    /// Line in that file, from 1.
    pub line: u32,
    /// Ids of the endpoints that it selects, ascending.
    pub endpoints: Vec<u16>,
}

/// Body of `PUT /v1/policy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyImport {
    /// What the text is called in refusals and explanations.
    #[schema(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 4096, example = "policies/db.yaml")]
    pub file: String,
    /// YAML or JSON with any number of policies, at most [`POLICY_TEXT_MOST`] bytes.
    #[schema(max_length = 4_194_304)]
    pub text: String,
}

/// What a change of the policies did; the rows of the policies are in the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyChange {
    /// Revision that the change made; the one before where it changed nothing.
    pub revision: u64,
    /// Revision whose rows are in the kernel.
    pub realized: u64,
    /// Policies that are new or replaced, `NetworkPolicy shop/db`.
    pub put: Vec<String>,
    /// Policies that are gone.
    pub removed: Vec<String>,
}

impl PolicyChange {
    /// Whether the kernel has the rows of the change.
    #[must_use]
    pub fn is_in_force(&self) -> bool {
        self.realized >= self.revision
    }
}

/// Query of `DELETE /v1/policy`: kind and name of one policy, or `all`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PolicyDeleteQuery {
    /// Kind; case matters.
    #[param(max_length = 64, example = "NetworkPolicy")]
    pub kind: Option<String>,
    /// Namespace; absent for kinds without namespace.
    #[param(max_length = 253, example = "shop")]
    pub namespace: Option<String>,
    /// Name.
    #[param(max_length = 253, example = "db")]
    pub name: Option<String>,
    /// All policies that were imported. Refused with one of the others.
    pub all: Option<bool>,
}

/// Protocol of the packet that `GET /v1/policy/explain` is asked about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicyProtocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
    /// ICMP (RFC 792).
    Icmp,
    /// ICMPv6 (RFC 4443).
    Icmpv6,
    /// Any other protocol, which has no ports: ESP, GRE, OSPF.
    Other,
    /// The transport header is not found: behind too many extension headers, or cut short.
    Unknown,
}

impl PolicyProtocol {
    /// Each of them.
    pub const ALL: [Self; 7] = [Self::Tcp, Self::Udp, Self::Sctp, Self::Icmp, Self::Icmpv6, Self::Other, Self::Unknown];

    /// Its name as the API writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
            Self::Icmp => "icmp",
            Self::Icmpv6 => "icmpv6",
            Self::Other => "other",
            Self::Unknown => "unknown",
        }
    }
}

/// Query of `GET /v1/policy/explain`: the first packet of a flow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PolicyExplainQuery {
    /// The sender: an endpoint in any form of `{id}`, or an address.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 600, example = "7")]
    pub from: String,
    /// The receiver, in the same forms.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 600, example = "192.0.2.7")]
    pub to: String,
    /// Protocol; TCP unless given.
    pub protocol: Option<PolicyProtocol>,
    /// Destination port; for ICMP and ICMPv6 the type, 0 to 255. 0 unless given.
    #[param(maximum = 65535, example = 443)]
    pub port: Option<u16>,
}

/// Whether a packet passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyVerdict {
    /// It passes.
    Accept,
    /// It is dropped.
    Deny,
}

impl PolicyVerdict {
    /// Its name as the API writes it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Deny => "deny",
        }
    }
}

/// Body of `GET /v1/policy/explain`: what becomes of the packet by the rows in the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyExplanation {
    /// Of both ends together: deny where one of them denies, or hands the flow to a proxy that does not serve it.
    pub verdict: PolicyVerdict,
    /// At the sender; absent when the sender is no endpoint of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<PolicyJudgement>,
    /// At the receiver; absent when the receiver is no endpoint of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<PolicyJudgement>,
    /// What else decides about such a packet: audit mode, the node's own packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// What one endpoint says about a packet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyJudgement {
    /// Endpoint id.
    pub endpoint: u16,
    /// Whether policy is enforced at this endpoint in this direction; without it the packet passes.
    pub enforced: bool,
    /// Verdict.
    pub verdict: PolicyVerdict,
    /// The rule that decides; absent when none does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// The way of the flow through the proxy, which judges what the connection carries; absent when it takes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirect: Option<PolicyRedirect>,
    /// Policies that isolate the endpoint in this direction, when no rule decides and the verdict is deny.
    pub isolated_by: Vec<String>,
    /// Number of the endpoint's rule set of this direction; 0 for none.
    pub rule_set: u32,
    /// Class of the other end in the tables; 0 for every other end that no rule names.
    pub peer_class: u32,
    /// Class of the port; 0 for every port that no rule names, 4294967295 where the transport header is not found.
    pub port_class: u32,
}

/// [`PolicyJudgement::port_class`] of a packet whose transport header is not found.
pub const UNKNOWN_PORT_CLASS: u32 = u32::MAX;

/// Where a rule was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRule {
    /// File.
    pub file: String,
    /// Line in it, from 1.
    pub line: u32,
    /// Kind and name of the document.
    #[schema(example = "NetworkPolicy shop/db")]
    pub document: String,
    /// Path of the rule in the document.
    #[schema(example = "spec.ingress[0]")]
    pub field: String,
}

/// Body of `GET /v1/endpoint/{id}/policy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointPolicy {
    /// Endpoint id.
    pub endpoint: u16,
    /// When policy is enforced for this endpoint: by its own setting, or by the node's mode.
    pub enforcement: PolicyEnforcement,
    /// Packets that policy would drop pass, and are only counted.
    pub audit: bool,
    /// Revision that the endpoint is to have.
    pub desired_revision: u64,
    /// Revision whose rows are in the kernel.
    pub realized_revision: u64,
    /// Packets to the endpoint.
    pub ingress: EndpointRules,
    /// Packets from the endpoint.
    pub egress: EndpointRules,
}

/// Rules of an endpoint in one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointRules {
    /// Number of the rule set; 0 for none. Endpoints with the same rules share it, and with it the counters.
    pub rule_set: u32,
    /// Policies that select the endpoint and say something about this direction, `NetworkPolicy shop/db`.
    pub policies: Vec<String>,
    /// Rows of the rule set; what matches none of them passes.
    pub rows: Vec<PolicyRow>,
}

/// A row of a rule set: what becomes of packets of a class of peers and a class of ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRow {
    /// Prefixes of the other end, or `any`; at most [`POLICY_ROW_PEERS_MOST`].
    pub peers: Vec<String>,
    /// How many prefixes more there are.
    pub more_peers: u64,
    /// Destinations: `TCP 80`, `UDP 8000-8015`, `any`.
    pub ports: Vec<String>,
    /// `accept`, `deny`, `pass` (on to the next tier), or `redirect` and the port of the proxy.
    #[schema(example = "accept")]
    pub verdict: String,
    /// The rule; absent for what no rule allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// Tier of the rule: `admin`, `namespaced` or `baseline`.
    #[schema(example = "namespaced")]
    pub tier: String,
    /// Packets that the row decided about: the first of each flow, each one of a flow that does not pass, and the next
    /// of each flow after a change of policy.
    pub packets: u64,
    /// Bytes of those packets, Ethernet header included.
    pub bytes: u64,
}

/// A namespace with its labels: element of `GET /v1/namespace`, answer of `PUT /v1/namespace/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Namespace {
    /// Name.
    #[schema(example = "shop")]
    pub name: String,
    /// Labels by key, `kubernetes.io/metadata.name` included.
    pub labels: BTreeMap<String, String>,
}

/// Body of `PUT /v1/namespace/{name}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamespaceLabels {
    /// All labels of the namespace, by key: those that it has now and that are not here go.
    pub labels: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_values_are_the_apis() {
        for protocol in PolicyProtocol::ALL {
            assert_eq!(serde_json::to_value(protocol).ok(), Some(json!(protocol.as_str())));
        }
        for verdict in [PolicyVerdict::Accept, PolicyVerdict::Deny] {
            assert_eq!(serde_json::to_value(verdict).ok(), Some(json!(verdict.as_str())));
        }
    }

    #[test]
    fn a_newer_agents_fields_are_passed_over_and_a_clients_are_refused() {
        let judged = json!({
            "endpoint": 7, "enforced": true, "verdict": "deny", "isolated_by": ["NetworkPolicy shop/db"], "rule_set": 3,
            "peer_class": 0, "port_class": 0, "later": {}
        });
        let answer = json!({"verdict": "deny", "ingress": judged, "later": 1});
        let read = serde_json::from_value::<PolicyExplanation>(answer).unwrap();
        assert_eq!((read.verdict, read.egress), (PolicyVerdict::Deny, None));
        assert_eq!(read.ingress.map(|judgement| (judgement.rule_set, judgement.rule)), Some((3, None)));
        assert!(serde_json::from_value::<PolicyImport>(json!({"file": "a", "text": "", "later": 1})).is_err());
        assert!(serde_json::from_value::<NamespaceLabels>(json!({"labels": {}, "later": 1})).is_err());
    }
}
