//! Network policy and labels of namespaces.
//!
//! A revision numbers a state of the policies, from 1; each change of the policies or of namespace labels makes the
//! next revision. 0: the agent has never had a policy.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Enforcement, PolicyRedirect};

/// Longest [`PolicyImport::text`], bytes.
pub const POLICY_TEXT_MOST: usize = 4 << 20;
/// Most prefixes listed in a [`PolicyRow`].
pub const POLICY_ROW_PEERS_MOST: usize = 16;

/// Body of `GET /v1/policy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyList {
    /// Revision that the agent has accepted.
    pub revision: u64,
    /// Revision in the kernel; at most `revision`.
    pub realized: u64,
    /// When policy is enforced.
    pub enforcement: Enforcement,
    /// Audit mode: policy drops are counted and pass.
    pub audit: bool,
    /// Why `realized` is below `revision`, or why a policy file is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Fill of the kernel tables.
    pub rows: PolicySizes,
    /// By kind, namespace and name; one element for each spec of a document.
    pub policies: Vec<PolicyInfo>,
}

/// Fill of the policy tables in the kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicySizes {
    /// Prefixes with a peer class: endpoint addresses, and networks in rules.
    pub peers: u64,
    /// Limit of `peers`.
    pub peers_limit: u64,
    /// Port prefixes of all rule sets.
    pub ports: u64,
    /// Limit of `ports`.
    pub ports_limit: u64,
    /// Pairs of peer class and port class.
    pub cells: u64,
    /// Limit of `cells`.
    pub cells_limit: u64,
    /// Rule sets of one direction; endpoints with the same rules share a set.
    pub sets: u64,
    /// Limit of `sets`.
    pub sets_limit: u64,
}

/// An accepted policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyInfo {
    /// `NetworkPolicy`, `ClusterNetworkPolicy`, `CiliumNetworkPolicy` or `CiliumClusterwideNetworkPolicy`.
    #[schema(example = "NetworkPolicy")]
    pub kind: String,
    /// Namespace; absent for cluster-wide kinds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Name.
    pub name: String,
    /// `admin`, `namespaced` or `baseline`.
    #[schema(example = "namespaced")]
    pub tier: String,
    /// Order within the tier, lower first, 0 to 1,000; absent in the namespaced tier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u16>,
    /// Selected endpoints, in words.
    pub subject: String,
    /// Default-deny directions: `ingress`, `egress`.
    pub isolates: Vec<String>,
    /// Number of ingress rules.
    pub ingress_rules: u64,
    /// Number of egress rules.
    pub egress_rules: u64,
    /// Source: name of an import, or policy file.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
    /// Selected endpoint ids, ascending.
    pub endpoints: Vec<u16>,
}

/// Body of `PUT /v1/policy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PolicyImport {
    /// Name for errors and explanations.
    #[schema(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 4096, example = "policies/db.yaml")]
    pub file: String,
    /// YAML or JSON with any number of policies, at most 4 MiB.
    #[schema(max_length = 4_194_304)]
    pub text: String,
}

/// Result of a policy change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyChange {
    /// Revision of the change; the previous revision if nothing changed.
    pub revision: u64,
    /// Revision in the kernel.
    pub realized: u64,
    /// New or replaced policies: `NetworkPolicy shop/db`.
    pub put: Vec<String>,
    /// Removed policies.
    pub removed: Vec<String>,
}

impl PolicyChange {
    /// Whether the change is in the kernel.
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
    /// Kind, case-sensitive.
    #[param(max_length = 64, example = "NetworkPolicy")]
    pub kind: Option<String>,
    /// Namespace; absent for cluster-wide kinds.
    #[param(max_length = 253, example = "shop")]
    pub namespace: Option<String>,
    /// Name.
    #[param(max_length = 253, example = "db")]
    pub name: Option<String>,
    /// All imported policies; excludes other parameters.
    pub all: Option<bool>,
}

/// Protocol of the packet in `GET /v1/policy/explain`.
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
    /// Another protocol, without ports.
    Other,
    /// Transport header not found: too many extension headers, or truncated.
    Unknown,
}

impl PolicyProtocol {
    /// All protocols.
    pub const ALL: [Self; 7] = [Self::Tcp, Self::Udp, Self::Sctp, Self::Icmp, Self::Icmpv6, Self::Other, Self::Unknown];

    /// The name in the API.
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
    /// Sender: endpoint in any form of `{id}`, or address.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 600, example = "7")]
    pub from: String,
    /// Receiver, as `from`.
    #[param(pattern = r"^[^\x00-\x1f\x7f-\x9f]+$", max_length = 600, example = "192.0.2.7")]
    pub to: String,
    /// TCP by default.
    pub protocol: Option<PolicyProtocol>,
    /// Destination port; for ICMP and ICMPv6 the type, 0 to 255. Default 0.
    #[param(maximum = 65535, example = 443)]
    pub port: Option<u16>,
}

/// Verdict about a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyVerdict {
    /// The packet passes.
    Accept,
    /// The packet is dropped.
    Deny,
}

impl PolicyVerdict {
    /// The name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Accept => "accept",
            Self::Deny => "deny",
        }
    }
}

/// Body of `GET /v1/policy/explain`: the verdict of the rows in the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyExplanation {
    /// Verdict of both ends: deny if one end denies, or redirects to a proxy that does not serve the flow.
    pub verdict: PolicyVerdict,
    /// Verdict at the sender, if an endpoint of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<PolicyJudgement>,
    /// Verdict at the receiver, if an endpoint of this node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ingress: Option<PolicyJudgement>,
    /// Other factors: audit mode, the node's own packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// Verdict of one endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyJudgement {
    /// Endpoint id.
    pub endpoint: u16,
    /// Whether policy is enforced in this direction; otherwise the packet passes.
    pub enforced: bool,
    /// Verdict.
    pub verdict: PolicyVerdict,
    /// Deciding rule, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// Redirect to the proxy, which checks the connection's content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirect: Option<PolicyRedirect>,
    /// Policies that deny by isolation when no rule decides.
    pub isolated_by: Vec<String>,
    /// Rule set; 0 for none.
    pub rule_set: u32,
    /// Class of the peer; 0 if no rule names it.
    pub peer_class: u32,
    /// Class of the port; 0 if no rule names it, 4294967295 without a transport header.
    pub port_class: u32,
}

/// [`PolicyJudgement::port_class`] without a transport header.
pub const UNKNOWN_PORT_CLASS: u32 = u32::MAX;

/// Source of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRule {
    /// File.
    pub file: String,
    /// Line, from 1.
    pub line: u32,
    /// Kind and name.
    #[schema(example = "NetworkPolicy shop/db")]
    pub document: String,
    /// Path in the document.
    #[schema(example = "spec.ingress[0]")]
    pub field: String,
}

/// Body of `GET /v1/endpoint/{id}/policy`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointPolicy {
    /// Endpoint id.
    pub endpoint: u16,
    /// The endpoint's setting, or the node's.
    pub enforcement: Enforcement,
    /// Audit mode: policy drops are counted and pass.
    pub audit: bool,
    /// Desired revision.
    pub desired_revision: u64,
    /// Revision in the kernel.
    pub realized_revision: u64,
    /// To the endpoint.
    pub ingress: EndpointRules,
    /// From the endpoint.
    pub egress: EndpointRules,
}

/// Rules of an endpoint in one direction.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EndpointRules {
    /// Rule set, with counters shared by endpoints with the same rules; 0 for none.
    pub rule_set: u32,
    /// Selecting policies: `NetworkPolicy shop/db`.
    pub policies: Vec<String>,
    /// Rows; a packet without a matching row passes.
    pub rows: Vec<PolicyRow>,
}

/// Verdict for a class of peers and a class of ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRow {
    /// Prefixes of the peer, at most 16, or `any`.
    pub peers: Vec<String>,
    /// Number of omitted prefixes.
    pub more_peers: u64,
    /// Destinations: `TCP 80`, `UDP 8000-8015`, `any`.
    pub ports: Vec<String>,
    /// `accept`, `deny`, `pass` (to the next tier), or `redirect` with the proxy port.
    #[schema(example = "accept")]
    pub verdict: String,
    /// The rule; absent for the default deny.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<PolicyRule>,
    /// `admin`, `namespaced` or `baseline`.
    #[schema(example = "namespaced")]
    pub tier: String,
    /// Packets decided: the first of each flow, all of a denied flow, and the next of each flow after a policy change.
    pub packets: u64,
    /// Bytes of `packets`, with the Ethernet header.
    pub bytes: u64,
}

/// A namespace with labels: element of `GET /v1/namespace`, answer of `PUT /v1/namespace/{name}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Namespace {
    /// Name.
    #[schema(example = "shop")]
    pub name: String,
    /// Labels, with `kubernetes.io/metadata.name`.
    pub labels: BTreeMap<String, String>,
}

/// Body of `PUT /v1/namespace/{name}`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamespaceLabels {
    /// Replacement of all labels.
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
