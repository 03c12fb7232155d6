//! Arguments of the commands about the whole node.

use std::{net::IpAddr, time::Duration};

use clap::{
    Args, Subcommand, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};

use wharf_api::{Enforcement, LogFormat, PACKET_REASONS};

use super::{
    flow::BpfCtCommand,
    list::{Choice, Follow},
    policy::BpfPolicyCommand,
};
use crate::target::Target;

/// Arguments of `wharf status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// One word: ok, degraded, down, or no-permission when this user may not use the socket.
    #[arg(long, conflicts_with_all = ["verbose", "all_controllers", "watch"])]
    pub(crate) brief: bool,
    /// The same word for readiness probes: without what containers do with their shares of the node's pools.
    #[arg(long, conflicts_with_all = ["brief", "verbose", "all_controllers", "watch"])]
    pub(crate) ready: bool,
    /// Everything: kernel features, every controller, BPF maps, counters.
    #[arg(long)]
    pub(crate) verbose: bool,
    /// Every controller of the node and of endpoints, not only those that fail or do not end.
    #[arg(long)]
    pub(crate) all_controllers: bool,
    #[command(flatten)]
    pub(crate) follow: Follow,
}

/// `wharf health ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum HealthCommand {
    /// Show the result of the last probes: state, addresses, round-trip times, the last relaunch.
    #[command(
        after_help = "Examples:\n  wharf health status\n  wharf health status --watch\n  wharf health status -o json"
    )]
    Status(Follow),
    /// Probe now by ICMP, TCP and HTTP, and show the result.
    #[command(after_help = "Example:\n  wharf health probe")]
    Probe,
}

/// `wharf ipam ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum IpamCommand {
    /// List pools with their fill, leases with their owners, and addresses in quarantine.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf ipam list
  wharf ipam list --watch
  wharf ipam list -o json | jq '.leases | length'"
    )]
    List(Follow),
    /// Release an address that a caller holds: one leased through the API, or kept by a delete without release.
    ///
    /// An endpoint's address goes with the endpoint. An address that nobody holds is no error.
    #[command(after_help = "\
Example:
  wharf ipam release 10.87.0.9")]
    Release {
        /// The address.
        address: std::net::IpAddr,
    },
}

/// `wharf port ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum PortCommand {
    /// List the ports of the node that lead to containers, by number.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf port list
  wharf port list -n shop -l app=web
  wharf port list -o json | jq -r '.[] | select(.host_port == 8080) | .container_id'"
    )]
    List {
        #[command(flatten)]
        choice: Choice,
        #[command(flatten)]
        follow: Follow,
    },
}

/// `wharf bpf ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BpfCommand {
    /// Show the shared table by which packets find their endpoint.
    #[command(subcommand, after_help = "Example:\n  wharf bpf endpoint list")]
    Endpoint(BpfEndpointCommand),
    /// Show the counters of the programs.
    #[command(subcommand, after_help = "Example:\n  wharf bpf metrics list --dropped")]
    Metrics(BpfMetricsCommand),
    /// Show the events of the programs.
    #[command(subcommand, after_help = "Example:\n  wharf bpf events list -n 20 --for 10s")]
    Events(BpfEventsCommand),
    /// Show or remove the flows that the programs track (connection tracking).
    #[command(subcommand, after_help = "Examples:\n  wharf bpf ct list\n  wharf bpf ct flush --endpoint 7")]
    Ct(BpfCtCommand),
    /// Show the rules of policy as the programs have them.
    #[command(subcommand, after_help = "Example:\n  wharf bpf policy get 7")]
    Policy(BpfPolicyCommand),
    /// Show BPF maps and their rows.
    #[command(subcommand, after_help = "Examples:\n  wharf bpf map list\n  wharf bpf map get ENDPOINTS")]
    Map(BpfMapCommand),
}

/// `wharf bpf endpoint ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BpfEndpointCommand {
    /// Every row: address, endpoint, epoch, interface.
    #[command(visible_alias = "ls", after_help = "Example:\n  wharf bpf endpoint list -o json")]
    List(Follow),
}

/// `wharf bpf metrics ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BpfMetricsCommand {
    /// Packets and bytes by endpoint, direction and reason.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf bpf metrics list
  wharf bpf metrics list --dropped --endpoint 7"
    )]
    List {
        /// Only dropped packets.
        #[arg(long)]
        dropped: bool,
        /// Only of this endpoint.
        #[arg(long, value_name = "ID")]
        endpoint: Option<Target>,
        #[command(flatten)]
        follow: Follow,
    },
}

/// `wharf bpf events ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BpfEventsCommand {
    /// Show packet events from now on, until the number or the time is reached.
    ///
    /// The agent reads the ring buffer as it fills, and the buffer keeps nothing: earlier events are not shown.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf bpf events list
  wharf bpf events list --for 30s -n 100 --type drop"
    )]
    List(EventsArgs),
}

/// `wharf bpf map ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BpfMapCommand {
    /// The shared maps and the maps of endpoints, each with its kind, fill and memory.
    #[command(visible_alias = "ls", after_help = "Examples:\n  wharf bpf map list\n  wharf bpf map list --all")]
    List {
        /// Also the maps of programs that are prepared for endpoints to come.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        follow: Follow,
    },
    /// The rows of one map in readable form.
    #[command(after_help = "Examples:\n  wharf bpf map get ENDPOINTS\n  wharf bpf map get 7/CONFIG")]
    Get {
        /// As `wharf bpf map list` names it.
        name: MapName,
    },
}

/// Kinds of events that can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EventKind {
    /// Dropped packets.
    Drop,
    /// Forwarded packets of endpoints that trace.
    Trace,
    /// Requests that the proxy judged.
    L7,
    /// What the agent does.
    Agent,
}

/// Which events are shown; all that are given must match, each by any of its values.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct EventFilter {
    /// Kinds of events.
    #[arg(long = "type", value_name = "KIND", value_enum, value_delimiter = ',')]
    pub(crate) kinds: Vec<EventKind>,
    /// Of this endpoint.
    #[arg(long, value_name = "ID")]
    pub(crate) endpoint: Option<Target>,
    /// Packets from this address.
    #[arg(long, value_name = "IP")]
    pub(crate) from: Option<IpAddr>,
    /// Packets to this address.
    #[arg(long, value_name = "IP")]
    pub(crate) to: Option<IpAddr>,
    /// Packets with this reason.
    #[arg(
        long = "reason",
        value_name = "REASON",
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(PACKET_REASONS)
    )]
    pub(crate) reasons: Vec<String>,
    /// Also drops that are usual: packets to multicast groups (reason multicast-unsupported).
    #[arg(long)]
    pub(crate) all: bool,
}

/// Arguments of `wharf monitor`.
#[derive(Debug, Args)]
pub(crate) struct MonitorArgs {
    #[command(flatten)]
    pub(crate) filter: EventFilter,
    /// End after this many events.
    #[arg(short = 'n', long, value_name = "COUNT", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// End after this long, for example `30s`, `500ms`, `2m`.
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub(crate) time: Option<Duration>,
}

/// Arguments of `wharf bpf events list`.
#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    pub(crate) filter: EventFilter,
    /// End after this many events.
    #[arg(short = 'n', long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: u64,
    /// End after this long.
    #[arg(long = "for", value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub(crate) time: Duration,
}

/// Arguments of `wharf audit`.
#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// Repair what may be repaired, print what was done, and compare again; the second result decides the exit status.
    #[arg(long)]
    pub(crate) repair: bool,
}

/// Arguments of `wharf explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// An endpoint's number, an address, a container id or a prefix of it, a pod, or the name of a link.
    #[arg(value_name = "ENDPOINT|CONTAINER|IP")]
    pub(crate) subject: Target,
}

/// Arguments of `wharf debuginfo`.
#[derive(Debug, Args)]
pub(crate) struct DebuginfoArgs {
    /// The archive to write; a file that is there is replaced [default: wharf-debuginfo-NODE-TIME.tar.gz].
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<std::path::PathBuf>,
}

/// `wharf config ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Every effective setting, or one.
    #[command(after_help = "Examples:\n  wharf config get\n  wharf config get log-level")]
    Get {
        /// The setting.
        #[arg(value_name = "KEY")]
        key: Option<SettingName>,
    },
    /// Change settings of the running agent; a restart forgets them.
    #[command(after_help = "\
Examples:
  wharf config set log-level=debug
  wharf config set log-level=wharf_agent=trace,info
  wharf config set log-format=json
  wharf config set trace=on trace-sampling=100     show one in a hundred of the traced packets")]
    Set {
        /// One of `log-level=LEVEL`, `log-format=text|json`, `trace=on|off`, `trace-sampling=N` (one in N traced
        /// packets is shown, of those that the programs report), `policy-enforcement=default|always|never`.
        #[arg(value_name = "KEY=VALUE", required = true)]
        settings: Vec<Setting>,
    },
}

/// A run-time setting of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Setting {
    LogLevel(String),
    LogFormat(LogFormat),
    Trace(bool),
    /// One in this many.
    TraceSampling(u32),
    PolicyEnforcement(Enforcement),
}

impl Setting {
    /// For shell completion.
    pub(crate) const EXAMPLES: [&str; 15] = [
        "log-level=error",
        "log-level=warn",
        "log-level=info",
        "log-level=debug",
        "log-level=trace",
        "log-level=off",
        "log-format=text",
        "log-format=json",
        "trace=on",
        "trace=off",
        "trace-sampling=1",
        "trace-sampling=100",
        "policy-enforcement=default",
        "policy-enforcement=always",
        "policy-enforcement=never",
    ];

    /// As in `wharf config get`.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::LogLevel(_) => "log-level",
            Self::LogFormat(_) => "log-format",
            Self::Trace(_) => "trace",
            Self::TraceSampling(_) => "trace-sampling",
            Self::PolicyEnforcement(_) => "policy-enforcement",
        }
    }
}

const UNKNOWN_SETTING: &str = "the settings that can be changed while the agent runs are \
    log-level, log-format, trace, trace-sampling and policy-enforcement";

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct BadValue(pub(super) &'static str);

impl std::str::FromStr for Setting {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let (key, value) = text.split_once('=').ok_or(BadValue("expected KEY=VALUE, for example log-level=debug"))?;
        match key {
            "log-level" if value.is_empty() => Err(BadValue("log-level needs a value, for example debug")),
            "log-level" => Ok(Self::LogLevel(value.to_owned())),
            "log-format" => match value {
                "text" => Ok(Self::LogFormat(LogFormat::Text)),
                "json" => Ok(Self::LogFormat(LogFormat::Json)),
                _ => Err(BadValue("log-format is text or json")),
            },
            "trace" => parse_on_off(value).map(Self::Trace).ok_or(BadValue("trace is on or off")),
            "trace-sampling" => value
                .parse()
                .map(Self::TraceSampling)
                .map_err(|_| BadValue("trace-sampling is a whole number: one in so many is shown, 1 shows all")),
            "policy-enforcement" => parse_enforcement(value).map(Self::PolicyEnforcement),
            _ => Err(BadValue(UNKNOWN_SETTING)),
        }
    }
}

pub(super) fn parse_enforcement(text: &str) -> Result<Enforcement, BadValue> {
    Enforcement::from_str(text, false).map_err(|_| BadValue("policy-enforcement is default, always or never"))
}

fn parse_on_off(text: &str) -> Option<bool> {
    match text {
        "on" | "true" | "yes" => Some(true),
        "off" | "false" | "no" => Some(false),
        _ => None,
    }
}

pub(super) fn on_off() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|text| text == "on")
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SettingName(pub(crate) String);

impl std::str::FromStr for SettingName {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

/// Becomes a URL path segment, so it must not name another path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MapName(pub(crate) String);

impl std::str::FromStr for MapName {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '/');
        match text {
            "" => Err(BadValue("a map needs a name; `wharf bpf map list` shows them")),
            _ if !text.chars().all(ok) || text.contains("..") => {
                Err(BadValue("a map's name holds only letters, digits, '_', '-', '.' and '/'"))
            }
            _ => Ok(Self(text.to_owned())),
        }
    }
}

/// A whole number and a unit: `ms`, `s`, `m` or `h`.
pub(super) fn duration(text: &str) -> Result<Duration, BadValue> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let factor = match unit {
        "ms" => 1,
        "s" | "" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(BadValue("the unit is one of ms, s, m, h")),
    };
    let number: u64 = digits.parse().map_err(|_| BadValue("expected a whole number and a unit, for example 30s"))?;
    match number.checked_mul(factor) {
        Some(ms) if (1..=86_400_000 * 365).contains(&ms) => Ok(Duration::from_millis(ms)),
        _ => Err(BadValue("must be more than nothing and at most a year")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        for bad in ["", "s", "0s", "-1s", "1.5s", "1d", "99999999999999999999s", "18446744073709551615h", "1ß"] {
            assert!(duration(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn settings() {
        assert_eq!("log-level=a=b,info".parse(), Ok(Setting::LogLevel("a=b,info".to_owned())));
        assert_eq!("trace=off".parse(), Ok(Setting::Trace(false)));
        assert_eq!("trace-sampling=100".parse(), Ok(Setting::TraceSampling(100)));
        assert_eq!("log-format=json".parse(), Ok(Setting::LogFormat(LogFormat::Json)));
        assert_eq!("policy-enforcement=never".parse(), Ok(Setting::PolicyEnforcement(Enforcement::Never)));
        for offered in Setting::EXAMPLES {
            assert!(offered.parse::<Setting>().is_ok(), "{offered}");
        }
        for bad in ["trace-sampling=-1", "trace-sampling=", "log-format=xml", "policy-enforcement=off"] {
            assert!(bad.parse::<Setting>().is_err(), "{bad:?}");
        }
        for bad in ["", "trace", "trace=", "trace=maybe", "log-level=", "ipv4-pool=10.0.0.0/8", "=x"] {
            assert!(bad.parse::<Setting>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn map_names_cannot_leave_their_path() {
        assert!("7/CONFIG".parse::<MapName>().is_ok());
        for bad in ["", "../endpoint", "a b", "a?x=1", "a#b", "a%2f", "a\r\nHost: x", "ä"] {
            assert!(bad.parse::<MapName>().is_err(), "{bad:?}");
        }
    }
}
