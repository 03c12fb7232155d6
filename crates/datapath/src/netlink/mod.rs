//! Route netlink, synchronously and in batches.
//!
//! A request does its work inside `sendmsg`, under the kernel's RTNL lock, so an asynchronous socket gains nothing and
//! would block a runtime worker. Here several requests go in one `sendmsg` and the answers are matched by sequence
//! number. A socket speaks for the network namespace it was opened in, whatever thread uses it later.

pub(crate) mod address;
pub(crate) mod batch;
pub(crate) mod conntrack;
pub(crate) mod dump;
pub(crate) mod link;
pub(crate) mod nexthop;
pub mod nft;
pub(crate) mod proxy;
pub(crate) mod route;
pub(crate) mod rule;
pub(crate) mod sockets;

pub(crate) use batch::{Connection, Refusal, Request};
