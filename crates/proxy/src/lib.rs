//! The L7 proxy: Envoy's xDS server and process.
//!
//! ```text
//! Proxy::ensure(Listener) -> ledger (versions, waits) -> xds (streams) -> server (gRPC, unix socket) -> Envoy
//!         Wait             <- ledger                  <- acknowledged, refused, ended                <-
//! Record                   <- records                                   <- server (ALS)              <-
//! Status::forwarded        <- forwarded                                 <- server (metrics)          <-
//! Envoy::supervise: starts Envoy, takes it over, starts it again; process: a pidfd, so that no end is missed
//! ```
//!
//! A redirected connection reaches a listener with its original addresses (TPROXY). Envoy connects to the server from
//! the client's address with a new port and the [`mark`] of the direction; the datapath must pass marked packets.
//!
//! Invariants:
//! - A wait ends once: acknowledged, refused, or cancelled with the server. Envoy's end ends only waits for removals.
//! - A refused listener does not affect others.
//! - A listener serves only its members. A denied request gets 403 or gRPC status 7; a denied TLS handshake is closed.
//! - Requests are unchanged except for normalized paths and hop-by-hop fields (RFC 9110, section 7.6.1).
//!
//! Limitations:
//! - Envoy's workers apply an acknowledged listener milliseconds later.
//! - Connections end 2 s after their member or listener, after 15 s if the server speaks first, after an hour of
//!   silence.
//! - A listener update takes Envoy's main thread 0.7 ms per member.
//! - A repeated header is matched as one value, joined by commas.
//! - Messages of an Envoy without an agent are lost.
//! - An earlier agent's listener from a refused response can stay until Envoy ends or its port is reused.

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
