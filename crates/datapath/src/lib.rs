//! The only crate that touches the kernel.
//!
//! [`LinuxKernel`] is the real body of [`wharf_core::kernel::Kernel`]: BPF programs and maps by aya, links, addresses
//! and routes by netlink, network namespaces by a thread of their own. [`FakeKernel`] implements the same trait in
//! memory, for tests without root. `tests/contract.rs` holds both to one contract.
//!
//! | part | does |
//! |---|---|
//! | [`linux`] | the trait's body: one method, one blocking job |
//! | `bpf` | objects, pins, maps, attaching, the drop-all sink |
//! | `netlink` | synchronous batches: several requests in one `sendmsg`, answers matched by sequence number |
//! | `netns` | the one thread that visits other network namespaces |
//! | `announce` | the node's answers to neighbours who look for a container |
//! | `settings` | settings (`sysctl`) that are changed, and the record of their values before |
//! | `source_rule` | routes by source address in a container with more than one interface |
//! | `redirects` | the way of packets to the proxy |
//! | `router` | the veth pair that carries the router addresses |
//! | `plugin_link` | links that another plugin made, behind which Wharf is chained: looked at, and never changed |
//! | `container_side` | the removal of a pair whose host side somebody moved away |
//! | `reaper` | deletes links, many in one kernel wait, and tells when nobody finds them any more |
//! | `link_watch` | reports links of endpoints whose carrier came up again |
//! | [`events`], [`program_log`] | the readers of the ring buffers |
//! | [`address_changes`] | notifications that the node's addresses have changed |
//!
//! Every job that can wait for the kernel runs on tokio's blocking threads or on one of the two threads above: link
//! operations hold the kernel's RTNL lock for milliseconds, and a runtime worker must not wait for it. A call whose
//! future is dropped still runs to its end in the kernel; every call is idempotent, so the next call repairs the
//! state.

pub mod address_changes;
mod announce;
mod bpf;
mod connect;
mod container_side;
mod error;
pub mod events;
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

pub use address_changes::AddressChanges;
pub use bpf::loader::Loader;
pub use bpf::objects::use_next_abi;
pub use bpf::pins::{ensure_pin_root, has_pin_root};
pub use events::EventReader;
pub use fake::FakeKernel;
pub use features::{check_capabilities, ipv6_off};
pub use link_watch::{Carriers, LinkWatch};
pub use linux::{LinuxKernel, OpenOptions};
pub use netlink::nft;
pub use networks::observe as observe_networks;
pub use program_log::ProgramLog;

/// Protocol number of every route and proxy neighbour that Wharf makes (`ip route show proto 87`): it tells Wharf's from others'.
pub const ROUTE_PROTOCOL: u8 = 87;

/// Name of the interface that carries the router addresses.
pub const ROUTER_IFNAME: &str = "wharf0";

/// Name of the other end of [`ROUTER_IFNAME`]'s veth pair, which has no addresses.
pub const ROUTER_PEER_IFNAME: &str = "wharf0p";
