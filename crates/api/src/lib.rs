//! The agent's REST API: types, the OpenAPI document, and the client over the unix socket.
//!
//! Everything a client sends is hostile until the agent has parsed it, so the types here carry plain text and numbers;
//! the agent turns them into the newtypes of `wharf-core`. The document in `openapi.json` is generated from these types
//! and the agent's routes; a test compares the two.
#![forbid(unsafe_code)]

pub mod bpf;
#[cfg(feature = "client")]
pub mod client;
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

/// Where the agent listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/wharf/wharf.sock";

/// Header of the CNI plugin's requests: which command they are made for, as JSON of the plugin's and the agent's own
/// (`wharf_handover::command`). The agent counts a request with it as a CNI command.
pub const COMMAND_HEADER: &str = "wharf-cni-command";

/// Header of each request of [`client::Client`]: until when its caller waits, milliseconds of the boot's clock (CLOCK_BOOTTIME). What the
/// agent reads later changes nothing.
pub const UNTIL_HEADER: &str = "wharf-until";

/// Name of the admin thread's socket, beside the one above: it answers what can be looked at when that one does not.
pub const ADMIN_SOCKET: &str = "admin.sock";
