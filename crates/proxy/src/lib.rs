//! The L7 proxy: what Envoy is told (xDS), what it acknowledges, and its life as a process. The crate knows no agent and no kernel map.
//!
//! ```text
//! Proxy::ensure(Listener) -> ledger (versions, waits) -> xds (streams) -> server (gRPC, unix socket) -> Envoy
//!         Wait             <- ledger                  <- acknowledged, refused, ended                <-
//! Record                   <- records                                   <- server (ALS)              <-
//! Status::forwarded        <- forwarded                                 <- server (metrics)          <-
//! Envoy::supervise: starts Envoy, takes it over, starts it again; process: a pidfd, so that no end is missed
//! ```
//!
//! A redirected connection reaches a listener with its own addresses (TPROXY: `bpf_sk_assign`, nftables). Envoy opens the
//! second leg from the client's address, with a new port, and the listener's [`mark`]; who redirects must let
//! marked packets pass.
//!
//! What holds:
//! - A wait ends once: acknowledged, refused with Envoy's reason, or cancelled with the server. It is about one listener, and one that
//!   Envoy refuses leaves the others alone. An Envoy that is away ends no wait; one that has ended ends the waits for less.
//! - A listener serves its members and closes every other connection. What no rule allows is answered 403 (`Access
//!   denied`), for gRPC with status 7; a TLS handshake is closed.
//! - Requests reach the server as the client sent them, but for normalized paths and for what belongs to one
//!   connection (RFC 9110, section 7.6.1).
//!
//! Limitations:
//! - Envoy acknowledges a listener when its main thread has it; its workers follow within milliseconds.
//! - Connections of a member or a listener that was taken away have 2 s to end; then Envoy closes them.
//! - Protocols in which the server speaks first are closed after 15 s: nothing tells what they are.
//! - What is silent for an hour is closed.
//! - An update of a listener costs Envoy's main thread 0.7 ms for each member; updates that come meanwhile go together.
//! - A header that occurs several times is matched as one value, joined by commas.
//! - The program of an Envoy that outlives its agent stays what it was; a new program is used from its next start on. Its messages
//!   are lost then: only the agent that started it reads them.
//! - What Envoy applied of a response that it refused for another listener, it does not tell a new agent. If that agent does not want
//!   the listener, it stays until Envoy ends or its port is used again.

mod bootstrap;
mod envoy;
mod forwarded;
mod ledger;
mod listener;
pub mod outside;
mod process;
mod proxy;
mod records;
mod resources;
mod server;
mod shares;
mod speakers;
mod status;
mod xds;

pub use envoy::{Envoy, EnvoyError, Socket, User};
pub use ledger::WaitError;
pub use listener::{Listener, ListenerKey, Member, mark};
pub use proxy::{Proxy, Wait, Watching};
pub use records::{Content, Record, Verdict};
pub use server::ServeError;
pub use shares::{Connections, Share};
pub use status::{EnvoyState, Status};
