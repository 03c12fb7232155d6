//! Sandboxes for machines without a container runtime.
//!
//! A sandbox is a network namespace with a name (a bind mount of nsfs, as `ip netns` makes), attached to networks by CNI
//! plugins. It is there before anything runs in it, and stays until it is removed. Nothing here knows Wharf's agent:
//! `wharf-cni` is one plugin of a chain like any other.
//!
//! The state is one file for each sandbox ([`record`], kept by `store`). It is written before each act and after it, so a
//! process that dies between any two is resumed by the next `stop` or `remove`:
//!
//! ```text
//! create   record -> namespace -> ADD of each plugin, in order -> ready
//! start    the same, with the record of a stopped sandbox
//! stop     record -> processes -> DEL of each plugin, in reverse order -> namespace -> stopped
//! remove   stop   -> record -> lock
//! ```
//!
//! Rooms: `conf` (network configurations), `plugin` (one execution), `network` (ADD, DEL and CHECK of a record's
//! attachments), `netns`, `process`, `command` (what runs in a sandbox), `terminal` (a terminal for a command), and over them
//! `manage`, `start` and `launch`, which act, and `observe`, which looks.

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
