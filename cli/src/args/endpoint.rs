//! Arguments of `wharf endpoint`.

use clap::{ArgGroup, Args, Subcommand};
use ipnet::IpNet;
use wharf_api::{EndpointState, Enforcement, NamedPort, Protocol, RegenerateLevel};

use super::{
    label::{LabelChanges, Labels},
    list::{Choice, NamespaceName},
    node::{BadValue, parse_enforcement},
};
use crate::target::Target;

/// `wharf endpoint ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum EndpointCommand {
    /// List all endpoints, or those that match every filter.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf endpoint list
  wharf endpoint list --state waiting-for-identity
  wharf endpoint list -n shop -l app=web --show-labels
  wharf endpoint list -o wide
  wharf endpoint list --watch                  and then every change, until interrupted
  wharf endpoint list -o json | jq -r '.[] | [.id, .epoch, .ifindex] | @tsv'"
    )]
    List(ListFilter),
    /// Show one endpoint: addresses, link, state, and what it waits for. Without an ID, list all of them.
    #[command(after_help = "\
Examples:
  wharf endpoint get
  wharf endpoint get 7
  wharf endpoint get web-1 -n shop               by the name of its pod
  wharf endpoint get 10.88.0.7 -o json")]
    Get {
        /// The endpoint (see `wharf endpoint --help`).
        #[arg(value_name = "ID")]
        id: Option<Target>,
        #[command(flatten)]
        choice: Choice,
    },
    /// Show one endpoint in full: as `get`, with the policies about it and its events.
    #[command(after_help = "Examples:\n  wharf endpoint describe 7\n  wharf endpoint describe web-1 -n shop")]
    Describe {
        /// The endpoint (see `wharf endpoint --help`).
        #[arg(value_name = "ID")]
        id: Target,
        /// The namespace of the pod that the ID names.
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<NamespaceName>,
    },
    /// Show the events of an endpoint, oldest first.
    #[command(after_help = "Example:\n  wharf endpoint log 7")]
    Log {
        /// The endpoint.
        #[arg(value_name = "ID")]
        id: Target,
    },
    /// Check an endpoint's programs, maps, link, addresses and routes now, and run test packets through its programs
    /// (nothing is sent). Exits 1 when a check fails.
    #[command(after_help = "\
Examples:
  wharf endpoint health 7 || wharf endpoint log 7
  wharf endpoint health 7 -o json | jq '.self_check.cases[] | select(.ok | not)'")]
    Health {
        /// The endpoint.
        #[arg(value_name = "ID")]
        id: Target,
    },
    /// Show an endpoint's labels and the identity they make, or change them: those that are not named stay.
    ///
    /// A label without `source:` keeps the source of the endpoint's label of that key; a new label is of the source
    /// k8s.
    #[command(
        visible_alias = "label",
        after_help = "\
Examples:
  wharf endpoint labels 7
  wharf endpoint labels 7 app=web,tier=front
  wharf endpoint labels 7 tier-                          removes the label
  wharf endpoint labels 7 cni:app=web                    of another source than Kubernetes
  wharf endpoint labels 7 --set app=web,tier=front       all of them: the others go"
    )]
    Labels {
        /// The endpoint.
        #[arg(value_name = "ID")]
        id: Target,
        /// Labels that are set or, with `KEY-`, removed.
        #[arg(value_name = "KEY=VALUE|KEY-")]
        changes: Vec<LabelChanges>,
        /// All labels that the endpoint is to have.
        #[arg(long, value_name = "KEY=VALUE", conflicts_with = "changes")]
        set: Vec<Labels>,
    },
    /// Regenerate an endpoint and wait until it is done. Traffic is not interrupted.
    #[command(after_help = "\
Examples:
  wharf endpoint regenerate 7                    maps only
  wharf endpoint regenerate 7 --level datapath   programs too")]
    Regenerate {
        /// The endpoint.
        #[arg(value_name = "ID")]
        id: Target,
        /// How much is renewed.
        #[arg(long, value_enum, default_value_t = RegenerateLevel::Policy)]
        level: RegenerateLevel,
    },
    /// Delete an endpoint: its programs, maps, link, routes and, without --keep-ip, its addresses.
    #[command(
        visible_alias = "disconnect",
        after_help = "\
Examples:
  wharf endpoint delete 7
  wharf endpoint delete 7 --epoch 41         only if it is still that attachment
  wharf endpoint delete 7 --keep-ip          the addresses stay leased
  wharf endpoint delete --container-id 3f9c51aa01b2d4e5...   all of a container's"
    )]
    Delete(DeleteArgs),
    /// Show desired and realized settings, or change settings of policy, source prefixes or tracing.
    #[command(after_help = "\
Examples:
  wharf endpoint config 7
  wharf endpoint config 7 --trace on    then: wharf monitor --type trace --endpoint 7
  wharf endpoint config 7 policy-enforcement=always      default follows the node's mode
  wharf endpoint config 7 port.http=8080/tcp port.old=   rules of policies name ports; an empty value removes one
  wharf endpoint config 7 source-prefixes=10.200.0.0/16,fd00:9::/64   it may send from these too, as a router; empty: none")]
    Config {
        /// The endpoint.
        #[arg(value_name = "ID")]
        id: Target,
        /// One of `policy-enforcement=default|always|never`, `port.NAME=NUMBER/tcp|udp|sctp` and
        /// `source-prefixes=PREFIX,...` (all of them).
        #[arg(value_name = "KEY=VALUE")]
        settings: Vec<EndpointSetting>,
        /// Trace forwarded packets of this endpoint.
        #[arg(long, value_name = "on|off", value_parser = super::node::on_off())]
        trace: Option<bool>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndpointSetting {
    /// Policy enforcement, which overrides the node's mode.
    Enforcement(Enforcement),
    /// `None` removes it. The agent checks the name.
    Port(String, Option<NamedPort>),
    /// All source prefixes.
    Sources(Vec<IpNet>),
}

impl std::str::FromStr for EndpointSetting {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let (key, value) =
            text.split_once('=').ok_or(BadValue("expected KEY=VALUE, for example policy-enforcement=always"))?;
        match (key, key.strip_prefix("port.")) {
            ("policy-enforcement", _) => parse_enforcement(value).map(Self::Enforcement),
            ("source-prefixes", _) => {
                let items = value.split(',').map(str::trim).filter(|item| !item.is_empty());
                let prefixes = items.map(str::parse).collect::<Result<Vec<IpNet>, _>>();
                let bad = |_| BadValue("source prefixes are ADDRESS/PREFIX, separated by commas");
                prefixes.map(Self::Sources).map_err(bad)
            }
            (_, Some(name)) if value.is_empty() => Ok(Self::Port(name.to_owned(), None)),
            (_, Some(name)) => {
                let port = parse_named_port(value).ok_or(BadValue("a port is NUMBER/PROTOCOL, for example 80/tcp"))?;
                Ok(Self::Port(name.to_owned(), Some(port)))
            }
            _ => Err(BadValue("an endpoint's settings are policy-enforcement, port.NAME and source-prefixes")),
        }
    }
}

/// Parses `80/tcp`.
fn parse_named_port(text: &str) -> Option<NamedPort> {
    let (port, protocol) = text.split_once('/')?;
    let protocol = Protocol::ALL.into_iter().find(|known| known.to_string() == protocol)?;
    Some(NamedPort { port: port.parse().ok()?, protocol })
}

/// Filters of `wharf endpoint list`; all must match.
#[derive(Debug, Args)]
pub(crate) struct ListFilter {
    #[command(flatten)]
    pub(crate) choice: Choice,
    /// Of this container.
    #[arg(long, value_name = "ID")]
    pub(crate) container_id: Option<String>,
    /// Of this CNI network.
    #[arg(long, value_name = "NAME")]
    pub(crate) network: Option<String>,
    /// In this state.
    #[arg(long, value_name = "STATE", value_enum)]
    pub(crate) state: Option<EndpointState>,
    /// Carrying this label, `source:key=value`.
    #[arg(long, value_name = "LABEL")]
    pub(crate) label: Option<String>,
    /// Of this pod.
    #[arg(long, value_name = "NAME")]
    pub(crate) pod_name: Option<String>,
    /// Every column: epoch, network, pod, host interface, age, labels; the same as `-o wide`.
    #[arg(long)]
    pub(crate) wide: bool,
    /// The labels too.
    #[arg(long)]
    pub(crate) show_labels: bool,
    /// Go on with every endpoint that comes, changes or goes, a row each, until interrupted or until the agent ends.
    #[arg(short = 'w', long)]
    pub(crate) watch: bool,
}

/// Arguments of `wharf endpoint delete`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).args(["id", "container_id"]))]
pub(crate) struct DeleteArgs {
    /// The endpoint.
    #[arg(value_name = "ID")]
    pub(crate) id: Option<Target>,
    /// All endpoints of this container (the whole id).
    #[arg(long, value_name = "ID")]
    pub(crate) container_id: Option<String>,
    /// Keep the addresses leased (NoIPRelease).
    #[arg(long)]
    pub(crate) keep_ip: bool,
    /// Only if the endpoint is of this epoch.
    #[arg(long, value_name = "N", conflicts_with = "container_id")]
    pub(crate) epoch: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_an_endpoint() {
        let port = |port: u16, protocol| Some(NamedPort { port: port.try_into().expect("a port"), protocol });
        let of = |text: &str| text.parse::<EndpointSetting>().ok();
        assert_eq!(of("policy-enforcement=never"), Some(EndpointSetting::Enforcement(Enforcement::Never)));
        let http = EndpointSetting::Port("http".to_owned(), port(80, Protocol::Tcp));
        assert_eq!(of("port.http=80/tcp"), Some(http));
        assert_eq!(of("port.http="), Some(EndpointSetting::Port("http".to_owned(), None)));
        for bad in ["", "port.http", "port.http=80", "port.http=0/tcp", "port.http=80/icmp", "port.http=65536/tcp"] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
        let sources = |texts: &[&str]| {
            Some(EndpointSetting::Sources(texts.iter().map(|text| text.parse().expect("a prefix")).collect()))
        };
        assert_eq!(of("source-prefixes=10.200.0.0/16,fd00:9::/64"), sources(&["10.200.0.0/16", "fd00:9::/64"]));
        assert_eq!(of("source-prefixes="), sources(&[]));
        for bad in ["source-prefixes", "source-prefixes=10.200.0.0", "source-prefixes=10.200.0.0/33"] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
        for bad in ["policy-enforcement=off", "trace=on", "port=80/tcp"] {
            assert_eq!(of(bad), None, "{bad:?}");
        }
    }
}
