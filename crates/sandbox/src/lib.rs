//! Sandboxes without a container runtime: named network namespaces (bind mounts of nsfs, as `ip netns` makes), attached
//! to networks by CNI plugins, of which `wharf-cni` is one.
//!
//! Each step writes the state file ([`record`]) before and after, so that the next `stop` or `remove` resumes after a
//! crash:
//!
//! ```text
//! create   record -> namespace -> ADD of each plugin, in order -> ready
//! start    the same, with the record of a stopped sandbox
//! stop     record -> processes -> DEL of each plugin, in reverse order -> namespace -> stopped
//! remove   stop   -> record -> lock
//! ```
//!
//! Modules `manage`, `start` and `launch` change sandboxes; `observe` only reads.

mod command;
mod conf;
mod error;
mod launch;
mod manage;
mod name;
mod netns;
mod network;
mod observe;
mod plugin;
mod port;
mod process;
pub mod record;
mod start;
mod store;
mod terminal;
mod view;

pub use command::{Handle, Launch, Output, Started, resolv_conf};
pub use conf::{ConfError, plugin_types};
pub use error::SandboxError;
pub use manage::{Dirs, Progress, Removed, Sandboxes, Spec, Stopped};
pub use name::SandboxName;
pub use plugin::{Failure, PluginError, Verb};
pub use port::Port;
pub use process::Running;
pub use terminal::{Resizer, Session, Terminal};
pub use view::{Checked, Details, State, Summary};
pub use wharf_names::ids::{MacAddr, NetworkName};
