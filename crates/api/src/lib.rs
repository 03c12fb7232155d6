//! REST API of the agent: types, `openapi.json`, and a client for the unix socket.
//!
//! The types hold unparsed text and numbers; the agent converts them to the newtypes of `wharf-core`. `openapi.json` is
//! generated from the types and the agent's routes, and a test compares them. `Unix ms` means milliseconds since the
//! Unix epoch.
#![forbid(unsafe_code)]

pub mod bpf;
#[cfg(feature = "client")]
pub mod client;
pub mod cluster;
pub mod config;
pub mod delegate;
pub mod endpoint;
pub mod error;
pub mod explain;
pub mod finding;
pub mod flow;
pub mod health;
pub mod ipam;
pub mod monitor;
pub mod object;
pub mod policy;
pub mod proxy;
pub mod selfcheck;
pub mod status;

pub use bpf::*;
pub use cluster::*;
pub use config::*;
pub use delegate::*;
pub use endpoint::*;
pub use error::*;
pub use explain::*;
pub use finding::*;
pub use flow::*;
pub use health::*;
pub use ipam::*;
pub use monitor::*;
pub use policy::*;
pub use proxy::*;
pub use selfcheck::*;
pub use status::*;

/// Default socket of the agent.
pub const DEFAULT_SOCKET: &str = "/run/wharf/wharf.sock";

/// Header with the CNI command of a request, as JSON (`wharf_handover::command`); the agent counts the command.
pub const COMMAND_HEADER: &str = "wharf-cni-command";

/// Header of each request of [`client::Client`]: the caller's deadline, milliseconds of CLOCK_BOOTTIME. A request
/// that the agent reads later changes nothing.
pub const UNTIL_HEADER: &str = "wharf-until";

/// File name of the admin socket in the directory of [`DEFAULT_SOCKET`]. It answers status requests when the API does
/// not.
pub const ADMIN_SOCKET: &str = "admin.sock";
