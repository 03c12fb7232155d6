//! Pure decisions: endpoint states, IPAM, identities, create and delete plans, the audit. No tokio, aya or netlink;
//! time is an argument.
#![forbid(unsafe_code)]

pub mod admission;
pub mod audit;
pub mod bandwidth;
pub mod endpoint;
pub mod finding;
#[cfg(any(test, feature = "fixtures"))]
pub mod fixtures;
pub mod flow;
pub mod identities;
pub mod identity;
pub mod identity_allocator;
pub mod ipam;
pub mod kernel;
pub mod mtu;
pub mod nat;
pub mod overlap;
pub mod plan;
pub mod policy;
pub mod selfcheck;
pub mod sources;
pub mod state;
pub mod store;
pub mod timeline;
pub mod upgrade;

pub use wharf_names::ids;
