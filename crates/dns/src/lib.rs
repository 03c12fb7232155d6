//! The DNS proxy: checks queried names, and reports answered addresses.
//!
//! A redirected query reaches a listener (`udp`, `tcp`) with its original addresses (TPROXY). `query` forwards it
//! (`upstream`) from the client's address (to a server on the node, from the node's address) with a new port, a new id
//! and [`wharf_common::policy::MARK_PROXIED_EGRESS`]. The datapath must pass packets with that mark, and deliver the
//! answers to the node's sockets.
//!
//! Invariants:
//! - [`Names::learn`] completes before a client gets an address.
//! - Queries and answers pass unchanged except for the id.
//! - An answer passes only from the server's address and port, on the query's socket, with its id and question.
//! - Bounds: 1,024 queries at once, 100 per endpoint; 256 connections, 16 per endpoint; 5 s for a server, 2 s for the
//!   node, 10 s for a silent client.
//!
//! Limitations:
//! - Zone transfers (AXFR, IXFR) are answered NOTIMP: they have several messages.
//! - Only A and AAAA records are learned, not hints of SVCB and HTTPS.
//! - The proxy's own answers have no OPT record (RFC 6891, section 6.1.1).
//! - Each TCP query uses a new connection to the server.
//! - No multicast DNS: other hosts answer.

mod books;
pub mod cache;
mod listener;
mod proxy;
mod query;
mod record;
mod socket;
mod speaker;
mod tcp;
mod udp;
mod upstream;
pub mod wire;

pub use listener::{Answer, Listener, Member, Names, Passes};
pub use proxy::{DnsProxy, Error, Status};
pub use record::{Outcome, Record, Transport};
pub use wire::Malformed;
