//! Arguments of `wharf bpf ct`.

use clap::{
    ArgGroup, Args, Subcommand,
    builder::{PossibleValuesParser, TypedValueParser},
};
use wharf_api::{AddressRange, FLOWS_DEFAULT, FLOWS_MOST, FlowProtocol, FlowQuery, FlowState};

use super::list::Follow;
use crate::target::Target;

/// `wharf bpf ct ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum BpfCtCommand {
    /// List tracked flows, or those that match every filter.
    ///
    /// A flow is both directions of a conversation: SOURCE began it. OWNER is the endpoint that it counts for. IDLE is
    /// the time since its last packet, LEFT the time until it is forgotten unless a packet comes.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf bpf ct list
  wharf bpf ct list --endpoint 7 --state established
  wharf bpf ct list --protocol tcp --port 443 --address 192.0.2.0/24
  wharf bpf ct list -o wide                    with the way that packets take, and what may be evicted
  wharf bpf ct list -o json | jq '.flows[] | select(.by_stack)'"
    )]
    List {
        #[command(flatten)]
        filter: FlowFilter,
        /// So many flows at most.
        #[arg(long, value_name = "N", default_value_t = FLOWS_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=i64::from(FLOWS_MOST)))]
        limit: u32,
        #[command(flatten)]
        follow: Follow,
    },
    /// Remove flows. Nothing is interrupted: a flow that lives on begins anew with its next packet.
    #[command(
        group(ArgGroup::new("which").args(["endpoint", "address", "port", "protocol", "state", "all"]).required(true).multiple(true)),
        after_help = "\
Examples:
  wharf bpf ct flush --endpoint 7
  wharf bpf ct flush --protocol udp --port 53
  wharf bpf ct flush --all"
    )]
    Flush {
        #[command(flatten)]
        filter: FlowFilter,
        /// Every flow of the node.
        #[arg(long, conflicts_with_all = ["endpoint", "address", "port", "protocol", "state"])]
        all: bool,
    },
}

/// Which flows; all that is given must match.
#[derive(Debug, Args)]
pub(crate) struct FlowFilter {
    /// One end is this endpoint.
    #[arg(long, value_name = "ID")]
    pub(crate) endpoint: Option<Target>,
    /// One end has this address, or one of this network.
    #[arg(long, value_name = "IP[/PREFIX]")]
    pub(crate) address: Option<AddressRange>,
    /// One end has this port.
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// tcp, udp, sctp, icmp, icmpv6, or a protocol's number.
    #[arg(long, value_name = "PROTOCOL")]
    pub(crate) protocol: Option<FlowProtocol>,
    /// In this state.
    #[arg(long, value_name = "STATE", value_parser = state_parser())]
    pub(crate) state: Option<FlowState>,
}

impl FlowFilter {
    pub(crate) fn query(&self) -> FlowQuery {
        FlowQuery {
            endpoint: self.endpoint.as_ref().map(|target| target.as_str().to_owned()),
            address: self.address,
            port: self.port,
            protocol: self.protocol,
            state: self.state,
            ..FlowQuery::default()
        }
    }
}

fn state_parser() -> impl TypedValueParser<Value = FlowState> {
    let of_name = |name: String| FlowState::ALL.into_iter().find(|state| state.as_str() == name);
    PossibleValuesParser::new(FlowState::ALL.map(FlowState::as_str))
        .try_map(move |name| of_name(name).ok_or("no such state"))
}
