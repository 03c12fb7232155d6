//! Synchronous route netlink, in batches: the kernel handles requests inside `sendmsg`. A socket stays in its
//! namespace.

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

pub(crate) use batch::{Answer, Connection, Refusal, Request};
