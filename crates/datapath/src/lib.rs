//! The only crate that touches the kernel. [`LinuxKernel`] implements [`wharf_core::kernel::Kernel`] with aya and
//! netlink; [`FakeKernel`] implements it in memory. `tests/contract.rs` runs one contract test on both.
//!
//! `bpf` has programs, maps and pins, `netlink` requests to the kernel; each other module has one part of the node or
//! of an endpoint. Link operations hold the RTNL lock for milliseconds, so jobs that can wait for the kernel run on
//! tokio's blocking threads or on the `netns` or `reaper` thread. A call whose future is dropped still completes. Calls
//! are idempotent.

pub mod address_changes;
mod announce;
mod bpf;
mod connect;
mod container_side;
mod error;
pub mod events;
#[cfg(feature = "fake")]
pub mod fake;
mod features;
mod forwarding;
pub mod leftovers;
mod link_watch;
pub mod linux;
mod mtu;
mod nat;
mod netlink;
mod netns;
mod networks;
mod node;
mod observe;
pub mod outside;
mod overlay;
mod peers;
mod plugin_link;
mod port_holders;
mod ports;
pub mod program_log;
mod reaper;
mod redirects;
mod router;
pub mod settings;
mod source_rule;
mod speakers;
mod translated;

pub use address_changes::AddressChanges;
pub use bpf::loaded::RECORD_STEM as PROGRAMS_STEM;
pub use bpf::loader::Loader;
pub use bpf::objects::use_next_abi;
pub use bpf::pins::{ensure_pin_root, has_pin_root};
pub use events::EventReader;
#[cfg(feature = "fake")]
pub use fake::FakeKernel;
pub use features::{check_capabilities, ipv6_off};
pub use link_watch::{Carriers, LinkWatch};
pub use linux::{LinuxKernel, OpenOptions};
pub use netlink::nft;
pub use networks::observe as observe_networks;
pub use program_log::ProgramLog;

/// Protocol number of Wharf's routes and proxy neighbours (`ip route show proto 87`).
pub const ROUTE_PROTOCOL: u8 = 87;

/// Protocol number of Wharf's routes to containers of other nodes (`ip route show proto 88`).
pub const PEER_PROTOCOL: u8 = 88;

/// Name of the interface with the router addresses.
pub const ROUTER_IFNAME: &str = "wharf0";

/// Name of the overlay's interface, without the prefix of endpoints' links, whose programs judge what leaves by them.
pub const OVERLAY_IFNAME: &str = "vxlan-wharf";

/// Name of [`ROUTER_IFNAME`]'s peer, without addresses.
pub const ROUTER_PEER_IFNAME: &str = "wharf0p";
