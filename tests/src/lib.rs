//! Scenarios against the real kernel.
//!
//! Every packet a test makes stays inside network namespaces the test made. A [`Node`] is such a namespace with a
//! `wharf-agent` in it, a bpffs, a run directory and a state directory of its own; a [`Sandbox`] stands in for a
//! container; [`cni`] runs the real plugin by the CNI protocol. All of a node's files live on a tmpfs that is mounted
//! in a mount namespace private to the test's thread ([`scratch`]), so nothing can be left on the machine, not even
//! when the test is killed.
//!
//! A scenario is a function of a running node, see [`scenario`].
//!
//! ```no_run
//! # use wharf_tests::{NodeConfig, scenario};
//! # fn main() -> anyhow::Result<()> {
//! scenario(NodeConfig::default(), |node| {
//!     let (web, db) = (node.sandbox("web")?, node.sandbox("db")?);
//!     let (web_ep, db_ep) = (node.attach(&web)?, node.attach(&db)?);
//!     wharf_tests::icmp::ping(web.space()?, db_ep.v4()?.into())?.must_answer()?;
//!     node.detach(&web_ep)?;
//!     node.detach(&db_ep)
//! })
//! # }
//! ```

pub mod agent;
pub mod attached;
pub mod bench;
pub mod cluster;
pub mod cni;
pub mod containerd;
pub mod crash;
pub mod delegate;
pub mod dns;
pub mod echo;
pub mod envoy;
pub mod feed;
pub mod frame;
pub mod grpc;
pub mod http;
pub mod icmp;
mod installed;
mod jail;
pub mod kube;
pub mod leftover;
pub mod node;
pub mod podman;
pub mod process;
pub mod programs;
pub mod report;
pub mod sandbox;
pub mod scratch;
pub mod sctp;
pub mod space;
pub mod stream;
pub mod wait;
pub mod web;
pub mod world;

pub use attached::Attached;
pub use cni::NetConf;
pub use node::{Node, NodeConfig, scenario};
pub use sandbox::Sandbox;
