//! Life of an endpoint: one task owns it; other tasks send it commands and read its view.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | endpoint | mailbox ([`Command`]), build permits, stop token | kernel and store changes, [`Shared`], replies |
//! | deleter ([`delete`]) | the endpoints to delete | one store transaction for all of them, the client's answer |
//!
//! [`Command`]: crate::node::endpoint::Command
//! [`Shared`]: crate::node::endpoint::Shared

pub mod abandoned;
pub mod build;
mod claim;
pub mod collect;
pub mod create;
pub mod delete;
pub mod deletions;
mod edit;
pub mod error;
mod external;
pub mod identity;
pub mod links;
pub mod look;
pub mod mtu;
pub mod orphan;
pub mod out_of_service;
pub mod prepared;
pub mod record;
pub mod refusals;
pub mod relink;
pub mod remove;
mod reserve;
pub mod resume;
pub mod task;
pub(crate) mod undo;
pub mod unfinished;
pub mod unknown;
