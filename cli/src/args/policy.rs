//! Arguments of `wharf policy` and `wharf bpf policy`.

use std::{convert::Infallible, path::PathBuf, str::FromStr, time::Duration};

use clap::{
    Args, Subcommand, ValueEnum, ValueHint,
    builder::{PossibleValuesParser, TypedValueParser},
};
use wharf_api::{PolicyDeleteQuery, PolicyExplainQuery, PolicyProtocol};

use super::{
    list::{Follow, NamespaceName},
    node::duration,
};
use crate::target::Target;

/// `wharf policy ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Check policy documents without an agent: show what each policy means, or why a document is refused.
    ///
    /// It reads NetworkPolicy, ClusterNetworkPolicy, CiliumNetworkPolicy and CiliumClusterwideNetworkPolicy as YAML or
    /// JSON. An unknown field is refused, not skipped. After a refused file, the other files are checked too, and
    /// standard output stays empty. Nothing is sent to the agent.
    ///
    /// TIER is the order of decision: admin and baseline with the priority (lower first), or namespaced. SUBJECT is
    /// the set of endpoints that the policy is about. ISOLATES names the directions in which they accept only what a
    /// rule accepts. RULES is the number of ingress and egress rules.
    #[command(after_help = "\
Exit status:
  0  every document is valid
  1  a document is refused, or a file cannot be read; standard error says why
  3  the command line is wrong

Examples:
  wharf policy validate web.yaml
  wharf policy validate policies/ extra.json
  wharf policy validate policies/ -o json | jq '.[] | select(.isolates == [])'
  kubectl get networkpolicies -A -o yaml | wharf policy validate -")]
    Validate {
        /// A file, `-` for standard input, or a directory: its *.yaml, *.yml and *.json, without subdirectories.
        #[arg(required = true, value_name = "FILE", value_hint = ValueHint::AnyPath)]
        files: Vec<PathBuf>,
    },
    /// Import the policies of files.
    ///
    /// All files are checked first, as `wharf policy validate` does; when one is refused, nothing is sent. The policies
    /// of a file are put in one change, file after file. A policy replaces the one of the same kind, namespace and
    /// name; the others stay. The command ends when the kernel has the new rules.
    #[command(after_help = "\
Exit status:
  0  the policies are in force
  1  a document is refused, or a file cannot be read; standard error says why
  2  the agent cannot be reached
  3  the command line is wrong

Examples:
  wharf policy import db.yaml
  wharf policy import policies/ extra.json
  kubectl get networkpolicies -A -o yaml | wharf policy import -")]
    Import {
        /// A file, `-` for standard input, or a directory: its *.yaml, *.yml and *.json, not those of its
        /// subdirectories.
        #[arg(required = true, value_name = "FILE", value_hint = ValueHint::AnyPath)]
        files: Vec<PathBuf>,
    },
    /// List the policies in force, with the endpoints that they select.
    ///
    /// The heading shows the revision in the kernel, the enforcement mode, and how full the tables are.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf policy list
  wharf policy list -n shop
  wharf policy list --watch                        again after each change, until interrupted"
    )]
    List {
        /// Only policies of this namespace; clusterwide policies have none.
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<NamespaceName>,
        #[command(flatten)]
        follow: Follow,
    },
    /// Show the policies of a name; without a name as `list`.
    #[command(after_help = "\
Examples:
  wharf policy get
  wharf policy get db -n shop
  wharf policy get shop/db -o wide                 with every endpoint, and where it was written
  wharf policy get -o json | jq -r '.policies[] | select(.endpoints == []) | .name'")]
    Get {
        /// Only policies of this name.
        #[arg(value_name = "[NAMESPACE/]NAME")]
        name: Option<QualifiedPolicyName>,
        /// Only policies of this namespace.
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<NamespaceName>,
        #[command(flatten)]
        follow: Follow,
    },
    /// Show the policies of a name in full, with each endpoint that they select.
    #[command(after_help = "Examples:\n  wharf policy describe shop/db\n  wharf policy describe db -n shop")]
    Describe {
        /// The policy's name.
        #[arg(value_name = "[NAMESPACE/]NAME")]
        name: QualifiedPolicyName,
        /// Only policies of this namespace.
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<NamespaceName>,
    },
    /// Remove a policy, or all that were imported.
    ///
    /// A policy of the agent's policy directory is refused: remove its file. The command ends when the kernel has the
    /// new rules.
    #[command(after_help = "\
Examples:
  wharf policy delete NetworkPolicy db -n shop
  wharf policy delete ClusterNetworkPolicy monitoring
  wharf policy delete --all")]
    Delete(PolicyDeleteArgs),
    /// Show the verdict about the first packet of a flow, and the rule or policy that decides. Sends no packet.
    ///
    /// Name a sender or receiver outside this node by its address.
    #[command(after_help = "\
Exit status:
  0  the packet passes
  1  policy denies the packet (in audit mode it passes all the same), or there is no such endpoint
  2  the agent cannot be reached
  3  the command line is wrong

Examples:
  wharf policy explain --from pod-name:shop/web --to pod-name:shop/db --port 5432
  wharf policy explain --from 192.0.2.7 --to 7 --protocol udp --port 53
  wharf policy explain --from 7 --to 10.88.0.9 --protocol icmp --port 8     ICMP type 8: echo request")]
    Explain(PolicyExplainArgs),
    /// Wait until the kernel has the rules of a revision. Exits 1 when the time is over before that.
    #[command(after_help = "\
Examples:
  wharf policy wait
  wharf policy wait 7 --timeout 5s")]
    Wait {
        /// The revision; without it, the one that the agent has when the command starts.
        revision: Option<u64>,
        /// How long to wait at most, for example `30s`, `500ms`, `2m`.
        #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
        timeout: Duration,
    },
}

/// Arguments of `wharf policy delete`.
#[derive(Debug, Args)]
pub(crate) struct PolicyDeleteArgs {
    /// The policy's kind.
    #[arg(value_enum, ignore_case = true, required_unless_present = "all")]
    pub(crate) kind: Option<PolicyKind>,
    /// The policy's name.
    #[arg(required_unless_present = "all")]
    pub(crate) name: Option<PolicyName>,
    /// The policy's namespace, `default` unless given; not for clusterwide kinds.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<NamespaceName>,
    /// All policies that were imported.
    #[arg(long, conflicts_with_all = ["kind", "name", "namespace"])]
    pub(crate) all: bool,
}

impl PolicyDeleteArgs {
    /// `None` for a namespace with a cluster-wide kind.
    pub(crate) fn query(self) -> Option<PolicyDeleteQuery> {
        let Self { kind, name, namespace, all } = self;
        let (name, namespace) = (name.map(|name| name.0), namespace.map(|namespace| namespace.0));
        if all {
            return Some(PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() });
        }
        let namespace = match (kind.is_some_and(PolicyKind::has_namespace), namespace) {
            // Documents without a namespace belong to `default`.
            (true, namespace) => Some(namespace.unwrap_or_else(|| "default".to_owned())),
            (false, None) => None,
            (false, Some(_)) => return None,
        };
        Some(PolicyDeleteQuery { kind: kind.map(|kind| kind.as_str().to_owned()), namespace, name, all: None })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PolicyName(pub(crate) String);

impl FromStr for PolicyName {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QualifiedPolicyName(pub(crate) String);

impl FromStr for QualifiedPolicyName {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

/// Kinds of policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PolicyKind {
    /// networking.k8s.io/v1
    #[value(name = "NetworkPolicy")]
    Kubernetes,
    /// policy.networking.k8s.io, clusterwide
    #[value(name = "ClusterNetworkPolicy")]
    Cluster,
    /// cilium.io/v2
    #[value(name = "CiliumNetworkPolicy")]
    Cilium,
    /// cilium.io/v2, clusterwide
    #[value(name = "CiliumClusterwideNetworkPolicy")]
    CiliumClusterwide,
}

impl PolicyKind {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Kubernetes => "NetworkPolicy",
            Self::Cluster => "ClusterNetworkPolicy",
            Self::Cilium => "CiliumNetworkPolicy",
            Self::CiliumClusterwide => "CiliumClusterwideNetworkPolicy",
        }
    }

    fn has_namespace(self) -> bool {
        matches!(self, Self::Kubernetes | Self::Cilium)
    }
}

/// Arguments of `wharf policy explain`.
#[derive(Debug, Args)]
pub(crate) struct PolicyExplainArgs {
    /// The sender: an endpoint (see `wharf endpoint --help`) or an address.
    #[arg(long, value_name = "ENDPOINT|IP")]
    pub(crate) from: Target,
    /// The receiver.
    #[arg(long, value_name = "ENDPOINT|IP")]
    pub(crate) to: Target,
    /// The protocol; `other` for any without ports (ESP, GRE), `unknown` for a packet whose transport header is not
    /// found.
    #[arg(long, default_value = "tcp", value_parser = protocol_parser())]
    pub(crate) protocol: PolicyProtocol,
    /// The destination port; for icmp and icmpv6 the type. 0 unless given.
    #[arg(long)]
    pub(crate) port: Option<u16>,
}

impl PolicyExplainArgs {
    pub(crate) fn query(&self) -> PolicyExplainQuery {
        PolicyExplainQuery {
            from: self.from.as_str().to_owned(),
            to: self.to.as_str().to_owned(),
            protocol: Some(self.protocol),
            port: self.port,
        }
    }
}

fn protocol_parser() -> impl TypedValueParser<Value = PolicyProtocol> {
    let of_name = |name: String| PolicyProtocol::ALL.into_iter().find(|protocol| protocol.as_str() == name);
    PossibleValuesParser::new(PolicyProtocol::ALL.map(PolicyProtocol::as_str))
        .try_map(move |name| of_name(name).ok_or("no such protocol"))
}

/// `wharf bpf policy ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BpfPolicyCommand {
    /// The rows that decide about an endpoint's packets, with their counters.
    ///
    /// A row is about a class of peers and a class of ports. Endpoints with the same rules share rows and counters.
    /// PACKETS counts the first packet of each flow and every packet that did not pass.
    #[command(after_help = "\
Examples:
  wharf bpf policy get 7
  wharf bpf policy get 7 -o wide                   with tier, place of the rule, and all peers that are known
  wharf bpf policy get 7 -o json | jq '.ingress.rows[] | select(.verdict == \"deny\")'")]
    Get {
        /// The endpoint (see `wharf endpoint --help`).
        #[arg(value_name = "ENDPOINT")]
        endpoint: Target,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delete(kind: Option<PolicyKind>, namespace: Option<&str>, all: bool) -> Option<PolicyDeleteQuery> {
        let (name, namespace) =
            (kind.map(|_| PolicyName("db".to_owned())), namespace.map(|n| NamespaceName(n.to_owned())));
        PolicyDeleteArgs { kind, name, namespace, all }.query()
    }

    #[test]
    fn a_policy_is_named_by_its_kind_namespace_and_name() {
        let of = |kind: PolicyKind, namespace: Option<&str>| {
            let (kind, namespace) = (Some(kind.as_str().to_owned()), namespace.map(str::to_owned));
            Some(PolicyDeleteQuery { kind, namespace, name: Some("db".to_owned()), all: None })
        };
        for (kind, namespaced) in PolicyKind::value_variants().iter().zip([true, false, true, false]) {
            let (without, with) = if namespaced {
                (of(*kind, Some("default")), of(*kind, Some("shop")))
            } else {
                (of(*kind, None), None)
            };
            assert_eq!(delete(Some(*kind), None, false), without);
            assert_eq!(delete(Some(*kind), Some("shop"), false), with);
        }
        let all = PolicyDeleteQuery { all: Some(true), ..PolicyDeleteQuery::default() };
        assert_eq!(delete(None, None, true), Some(all));
    }

    #[test]
    fn a_kind_is_written_as_in_documents() {
        for kind in PolicyKind::value_variants() {
            let shown = kind.to_possible_value().map(|value| value.get_name().to_owned());
            assert_eq!(shown.as_deref(), Some(kind.as_str()));
        }
    }
}
