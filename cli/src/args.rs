//! The command line, defined with clap.

mod cluster;
mod endpoint;
mod flow;
mod label;
mod list;
mod namespace;
mod node;
mod policy;
mod proxy;
mod sandbox;

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};

pub(crate) use cluster::ClusterCommand;
pub(crate) use endpoint::{DeleteArgs, EndpointCommand, EndpointSetting, ListFilter};
pub(crate) use flow::BpfCtCommand;
pub(crate) use label::{BadLabel, LabelChange, LabelChanges, Labels, changed};
pub(crate) use list::{Choice, Follow, NamespaceName};
pub(crate) use namespace::NamespaceCommand;
pub(crate) use node::{
    AuditArgs, BpfCommand, BpfEndpointCommand, BpfEventsCommand, BpfMapCommand, BpfMetricsCommand, ConfigCommand,
    DebuginfoArgs, EventFilter, EventKind, ExplainArgs, HealthCommand, IpamCommand, MapName, MonitorArgs, PortCommand,
    Setting, SettingName, StatusArgs,
};
pub(crate) use policy::{
    BpfPolicyCommand, PolicyCommand, PolicyDeleteArgs, PolicyExplainArgs, PolicyKind, PolicyName, QualifiedPolicyName,
};
pub(crate) use proxy::ProxyCommand;
pub(crate) use sandbox::{CreateArgs, ExecArgs, GraceArgs, RunArgs, SandboxArgs, SandboxCommand};

const EXIT_CODES: &str = "\
Exit status:
  0  done, and what was asked about is well
  1  what was asked about is not well, not found, or refused by the agent; of `status`: degraded
  2  the agent cannot be reached; of `status`: down
  3  the command line is wrong; nothing was changed

Examples:
  wharf status
  wharf endpoint list
  wharf endpoint get 10.88.0.7
  wharf monitor --type drop
  wharf --socket /tmp/node-a/wharf.sock audit";

/// The operator's view of a Wharf node: its agent, its endpoints, their BPF programs and maps.
#[derive(Debug, Parser)]
#[command(name = "wharf", version, after_help = EXIT_CODES, max_term_width = 100)]
#[command(subcommand_required = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options that every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options of every command")]
pub(crate) struct Global {
    /// The agent's unix socket.
    #[arg(long, global = true, value_name = "PATH", env = "WHARF_SOCKET", hide_env_values = true, default_value = wharf_api::DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Tables for people, or the API's own objects for scripts.
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    pub(crate) output: Format,
    /// Colour; `auto` means only on a terminal and only without NO_COLOR.
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t = ColorWhen::Auto)]
    pub(crate) color: ColorWhen,
}

/// How answers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people.
    Table,
    /// For people, with all columns.
    Wide,
    /// The API's objects as JSON.
    Json,
    /// The same as YAML.
    Yaml,
}

/// When to colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ColorWhen {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What can be asked.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show the state of the node: components, controllers, addresses, endpoints, memory.
    ///
    /// Answers even when a part of the agent is stuck: a part that does not answer in 1.5 s is shown with its last
    /// value, marked as stale with its age and what it waits for. When the API itself does not answer, the admin thread
    /// is asked (admin.sock beside the agent's socket), and the output says so.
    #[command(after_help = "\
Exit status:
  0  ok: the agent serves and nothing is amiss (a part that is pending is no fault)
  1  degraded: the agent serves, and something is amiss or stale
  2  down: the agent does not serve, a part of it fails, or it cannot be reached; also when this user may not use its
     socket, for which --brief prints no-permission
  3  the command line is wrong

Examples:
  wharf status                       the whole screen
  wharf status --brief               one word (ok, degraded, down, no-permission), with the same exit status
  wharf status --ready               the same for readiness probes, apart from what containers open
  wharf status --all-controllers     with every controller, healthy or not, those of endpoints too
  wharf status --verbose             with every BPF map too
  wharf status --watch               again after each change, until interrupted
  wharf status -o json | jq '.components[] | select(.stale_ms)'    for scripts")]
    Status(StatusArgs),
    /// List, show and change endpoints. An endpoint is one network attachment of one container.
    #[command(
        subcommand,
        visible_alias = "ep",
        after_help = "\
An endpoint ID is one of:
  7                           the endpoint's number
  10.88.0.7, fd00:88::7       one of its addresses (also ipv4:..., ipv6:...)
  3f9c51aa01b2, 3f9c51aa/eth1 a container id or the start of one, with an interface if it has several
  web-1                       the name of a pod or a sandbox
  wh00070000002a              the host side of its link
  container-id:ID             a whole container id
  cni-attachment-id:ID:IFNAME an attachment
  pod-name:[NAMESPACE/]NAME   a pod
A name that fits several endpoints is refused, and they are listed.

Examples:
  wharf endpoint list --state ready
  wharf endpoint list -n shop -l app=web
  wharf endpoint get 7 -o yaml
  wharf endpoint describe 7
  wharf endpoint regenerate 7 --level datapath"
    )]
    Endpoint(EndpointCommand),
    /// Show the health endpoints, which probe the container network end to end.
    ///
    /// A health endpoint is a process of the agent's own, attached like any container and probed through the same
    /// programs. Exits 0 when every node's is ok, 1 when one is not, 2 when the agent cannot be reached.
    #[command(
        subcommand,
        after_help = "\
Examples:
  wharf health status                as last probed
  wharf health probe                 probe now
  wharf health status -o json | jq '.nodes[].state'"
    )]
    Health(HealthCommand),
    /// Show the nodes of the cluster, this node's routes to their containers, and the cluster feed.
    #[command(
        subcommand,
        after_help = "Examples:\n  wharf cluster status\n  wharf cluster nodes\n  wharf cluster feed"
    )]
    Cluster(ClusterCommand),
    /// List pools and leases, release addresses.
    #[command(subcommand, after_help = "Example:\n  wharf ipam list")]
    Ipam(IpamCommand),
    /// List published ports.
    #[command(subcommand, after_help = "Example:\n  wharf port list")]
    Port(PortCommand),
    /// Check and import policy documents, and show their decisions.
    #[command(
        subcommand,
        after_help = "\
Examples:
  wharf policy validate policies/    check documents, without an agent
  wharf policy import policies/      put them in force
  wharf policy list                  what is in force
  wharf policy describe shop/db      one policy, and its endpoints
  wharf policy explain --from 7 --to 9 --port 443"
    )]
    Policy(PolicyCommand),
    /// Show the L7 proxy: Envoy, the listeners, endpoints that wait for it, and names from DNS queries of containers.
    ///
    /// Rules about HTTP requests and TLS server names redirect connections to Envoy. Rules about names redirect DNS
    /// queries to the agent.
    #[command(
        subcommand,
        after_help = "\
Examples:
  wharf proxy status                 how Envoy is, and what it has not done
  wharf proxy listeners              its ports, and what passes there
  wharf proxy names                  names and their addresses, which toFQDNs follows
  wharf proxy completions            who waits for it now
  wharf monitor --type l7            the requests and queries that it judges"
    )]
    Proxy(ProxyCommand),
    /// Show or set the labels of namespaces, by which policies select.
    #[command(subcommand, visible_alias = "ns", after_help = "Example:\n  wharf namespace label shop team=a")]
    Namespace(NamespaceCommand),
    /// Show BPF maps, counters, events, flows and rules.
    #[command(
        subcommand,
        after_help = "\
Examples:
  wharf bpf endpoint list            the rows by which packets find their endpoint
  wharf bpf metrics list             packets and bytes by endpoint, direction and reason
  wharf bpf ct list --endpoint 7     the flows of endpoint 7
  wharf bpf policy get 7             the rules that decide about its packets
  wharf bpf map get 7/CONFIG         what endpoint 7's programs are told"
    )]
    Bpf(BpfCommand),
    /// Make, run, list, stop and remove sandboxes: containers' networks on a machine without a runtime.
    ///
    /// A sandbox is a network namespace with a name (`ip netns list` shows it), attached to networks by CNI plugins,
    /// Wharf's or others. It exists before any process runs in it, and stays until it is removed. These commands need
    /// root. Only the plugin asks the agent.
    #[command(
        visible_alias = "sb",
        after_help = "\
Examples:
  wharf sandbox create web --label app=web --publish 8080:80
  wharf sandbox run web -- python3 -m http.server 80
  wharf sandbox list
  wharf sandbox inspect web
  wharf sandbox stop web
  wharf sandbox rm web
  wharf sandbox run --rm probe -- ping -c 1 10.87.0.2"
    )]
    Sandbox(SandboxArgs),
    /// Watch drops, traces and the agent's own events as they happen.
    #[command(after_help = "\
Examples:
  wharf monitor                                 everything but multicast, until interrupted
  wharf monitor --all                           drops of multicast packets too
  wharf monitor --type drop --endpoint 7        why endpoint 7 loses packets
  wharf monitor --type l7 --endpoint 7          the requests of endpoint 7 that the proxy judges
  wharf monitor --from 10.88.0.7 --to 10.88.0.9 -n 5
  wharf monitor -o json | jq -c .               one object a line

Forwarded packets are shown only for endpoints that trace: `wharf endpoint config 7 --trace on`.
The reasons that --reason knows are those of `wharf bpf metrics list`.")]
    Monitor(MonitorArgs),
    /// Compare kernel, BPF file system and store. A healthy node has no findings.
    ///
    /// Prints one line for each finding and exits 1 when there are any; prints nothing on standard output and exits 0
    /// when there are none; exits 2 when the agent cannot be reached.
    #[command(after_help = "\
Examples:
  wharf audit                   look
  wharf audit --repair          mend what may be mended, then look again
  wharf audit -o json | jq '.findings[].subject'")]
    Audit(AuditArgs),
    /// Explain the state of an endpoint, a container or an address: since when, what it waits for, what happened.
    ///
    /// The first line is the conclusion. Endpoints that are gone are explained too, for a day, and so are creates that
    /// failed. Exits 0 when nothing is wrong, 1 when something is wrong or the name is unknown, 2 when the agent cannot
    /// be reached, 3 when the name is ambiguous; the candidates are listed then.
    #[command(after_help = "\
Examples:
  wharf explain 7                    an endpoint, by its number
  wharf explain 10.87.0.9            an address: whose it is, or was, or why nobody has it
  wharf explain 3f9c51aa             a container, by the beginning of its id
  wharf explain 3f9c51aa/eth1        one of its interfaces
  wharf explain pod-name:default/web
  wharf explain 7 -o json | jq .timeline")]
    Explain(ExplainArgs),
    /// Write one archive for troubleshooting: status, records, maps, logs, kernel facts.
    ///
    /// The archive has names, labels, addresses and log lines, but no secrets: no environment, no tokens, no data of
    /// containers. Without an agent, it has the parts that can still be read. Exits 0 when every part is complete, 1
    /// when a part could not be read; a file in the archive then has the reason.
    #[command(
        visible_alias = "sysdump",
        after_help = "\
Examples:
  wharf debuginfo
  wharf debuginfo --file /tmp/node-a.tar.gz
  tar -tzf /tmp/node-a.tar.gz"
    )]
    Debuginfo(DebuginfoArgs),
    /// Show or change settings of the running agent.
    #[command(
        subcommand,
        after_help = "\
Examples:
  wharf config get
  wharf config get log-level
  wharf config set log-level=debug trace=on     until the agent restarts"
    )]
    Config(ConfigCommand),
    /// Print a completion script for a shell.
    #[command(after_help = "\
Examples:
  wharf completion bash > /usr/share/bash-completion/completions/wharf
  wharf completion zsh > ~/.zfunc/_wharf
  wharf completion fish > ~/.config/fish/completions/wharf.fish")]
    Completion {
        /// The shell.
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Show the versions of this program and of the agent.
    #[command(after_help = "\
Examples:
  wharf version
  wharf version --client     without asking the agent")]
    Version {
        /// Do not ask the agent.
        #[arg(long)]
        client: bool,
    },
}

/// Commands for completion scripts and packages. They are a command line apart: a hidden command of [`Cli`] would be
/// offered by the completion scripts, which clap makes of all commands.
#[derive(Debug, Parser)]
#[command(name = "wharf")]
pub(crate) struct Internal {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: InternalCommand,
}

impl Internal {
    pub(crate) fn is_named_by(arguments: &[OsString]) -> bool {
        let first = arguments.get(1);
        Self::command().get_subcommands().any(|sub| first.is_some_and(|word| word == sub.get_name()))
    }
}

/// What scripts and packages can ask.
#[derive(Debug, Subcommand)]
#[command(disable_help_subcommand = true)]
pub(crate) enum InternalCommand {
    /// Print what may stand at the end of a command line. Exits 1 when no names are expected there.
    Candidates {
        /// The words behind `wharf` up to the cursor.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Write manual pages into a directory.
    Man {
        /// The directory, which must be there.
        dir: PathBuf,
    },
}

impl Command {
    /// Whether the command runs until interrupted.
    pub(crate) fn watches(&self) -> bool {
        let follow = match self {
            Self::Status(args) => args.follow,
            Self::Endpoint(EndpointCommand::List(args)) => return args.watch,
            Self::Health(HealthCommand::Status(follow))
            | Self::Cluster(ClusterCommand::Nodes(follow))
            | Self::Ipam(IpamCommand::List(follow))
            | Self::Port(PortCommand::List { follow, .. })
            | Self::Policy(PolicyCommand::List { follow, .. } | PolicyCommand::Get { follow, .. })
            | Self::Namespace(NamespaceCommand::List { follow, .. })
            | Self::Proxy(
                ProxyCommand::Status(follow)
                | ProxyCommand::Listeners(follow)
                | ProxyCommand::Names(follow)
                | ProxyCommand::Completions(follow),
            ) => *follow,
            _ => return false,
        };
        follow.watch
    }
}

#[cfg(test)]
mod tests;
