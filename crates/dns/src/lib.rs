//! The DNS proxy: judges the names that containers ask, and tells the node the addresses in the answers. The crate knows no agent and no
//! kernel map.
//!
//! ```text
//! client -> udp, tcp -> query: wire::question -> Listener::passes -> upstream (in the client's name) -> server
//!                              wire::addresses <- ------------------------------------------------ <- answer
//!                              Names::learn, then the answer to the client (udp: speaker)
//! Record <- books (bounds, totals) <- query          cache: names and addresses, for the node
//! ```
//!
//! A redirected query reaches a listener with its own addresses (TPROXY). The query to the server has the client's address, a new port,
//! a new id and [`wharf_common::policy::MARK_PROXIED_EGRESS`]; who redirects must let packets with that mark pass, and bring the answers to the
//! node's sockets. A server that is the node itself is asked in the node's name.
//!
//! What holds:
//! - A client gets no address before [`Names::learn`] is done with it.
//! - Queries and answers pass byte for byte, but for the id: EDNS, unknown types, the case of names.
//! - An answer is passed on only if it came from the server's address and port to the query's own socket, with the query's id and question.
//! - Everything is bounded: 1,024 queries at once, 100 of an endpoint; 256 connections, 16 of an endpoint; 5 s for a server, 2 s for the node, 10 s
//!   for a silent client.
//!
//! Limitations:
//! - A zone transfer (AXFR, IXFR) is answered NOTIMP, because it is more than one message.
//! - Addresses in other records than A and AAAA (the hints of SVCB and HTTPS) are not learned.
//! - The proxy's own answers have no OPT record, as those of a server without EDNS (RFC 6891, section 6.1.1).
//! - Each query of a client's connection has a connection of its own to the server.
//! - Multicast DNS is not served: its answers come from other hosts than the one that was asked.

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
