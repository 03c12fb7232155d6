//! The command line: what can be asked, in clap's words. Nothing is done here.

mod endpoint;
mod node;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use endpoint::{DeleteArgs, EndpointCommand, Level, ListFilter};
pub(crate) use node::{
    AuditArgs, BpfCommand, BpfEndpointCommand, BpfEventsCommand, BpfMapCommand, BpfMetricsCommand, ConfigCommand,
    EventFilter, EventKind, IpamCommand, MonitorArgs, Setting, StatusArgs,
};

const EXIT_CODES: &str = "\
Exit status:
  0  done, and what was asked about is well
  1  what was asked about is not well, not found, or refused by the agent
  2  the agent cannot be reached
  3  the command line is wrong

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
    /// How the node is: components, controllers, addresses, endpoints, BPF maps.
    ///
    /// Exits 0 when all is well and the agent serves, 1 when something is degraded, failing or not served, 2 when the
    /// agent cannot be reached.
    #[command(after_help = "\
Examples:
  wharf status                       the whole screen
  wharf status --brief               one word; exits 0 only when the agent serves (a readiness probe)
  wharf status --all-controllers     with every controller, healthy or not
  wharf status -o json | jq .ipam    for scripts")]
    Status(StatusArgs),
    /// Endpoints: one network attachment of one container each.
    #[command(
        subcommand,
        visible_alias = "ep",
        after_help = "\
An endpoint ID is one of:
  7                           the endpoint's number
  10.88.0.7, fd00:88::7       one of its addresses (also ipv4:..., ipv6:...)
  3f9c51aa01b2                a container id or the start of one, if that is enough to tell it apart
  container-id:ID             a whole container id
  cni-attachment-id:ID:IFNAME an attachment
  pod-name:[NAMESPACE/]NAME   a pod

Examples:
  wharf endpoint list --state ready
  wharf endpoint get 7 -o yaml
  wharf endpoint regenerate 7 --level datapath"
    )]
    Endpoint(EndpointCommand),
    /// Addresses: pools and leases.
    #[command(subcommand, after_help = "Example:\n  wharf ipam list")]
    Ipam(IpamCommand),
    /// What the kernel holds: BPF maps, counters, events.
    #[command(
        subcommand,
        after_help = "\
Examples:
  wharf bpf endpoint list            the rows by which packets find their endpoint
  wharf bpf metrics list             packets and bytes by endpoint, direction and reason
  wharf bpf map get 7/CONFIG         what endpoint 7's programs are told"
    )]
    Bpf(BpfCommand),
    /// Watch drops, traces and the agent's own events as they happen.
    #[command(after_help = "\
Examples:
  wharf monitor                                 everything, until interrupted
  wharf monitor --type drop --endpoint 7        why endpoint 7 loses packets
  wharf monitor --from 10.88.0.7 --to 10.88.0.9 -n 5
  wharf monitor -o json | jq -c .               one object a line

Forwarded packets are shown only for endpoints that trace: `wharf endpoint config 7 --trace on`.
The reasons that --reason knows are those of `wharf bpf metrics list`.")]
    Monitor(MonitorArgs),
    /// Compare what the kernel, the BPF file system and the store hold; nothing found is healthy.
    ///
    /// Prints one line a finding and exits 1 when there are any; prints nothing on standard output and exits 0 when
    /// there are none; exits 2 when the agent cannot be reached.
    #[command(after_help = "\
Examples:
  wharf audit                   look
  wharf audit --repair          mend what may be mended, then look again
  wharf audit -o json | jq '.findings[].subject'")]
    Audit(AuditArgs),
    /// Settings of the running agent.
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
    /// Write man pages into a directory.
    #[command(hide = true)]
    Man {
        /// The directory, which must be there.
        dir: PathBuf,
    },
    /// Versions of this program and of the agent.
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

#[cfg(test)]
mod tests;
