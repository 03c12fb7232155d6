//! Life of an endpoint: one task owns it and serves its mailbox. [`delete`] ends several in one transaction.

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
