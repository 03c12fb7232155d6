//! An endpoint's life: one task owns it, others send it commands and read its picture.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | endpoint | mailbox ([`crate::node::endpoint::Command`]), build permits, stop token | kernel and store changes, [`crate::node::endpoint::Shared`], replies |
//! | deleter ([`delete`]) | the endpoints to delete | one store transaction for all of them, the client's answer |

pub mod build;
mod claim;
pub mod collect;
pub mod create;
pub mod delete;
pub mod deletions;
pub mod look;
pub mod orphan;
pub mod out_of_service;
pub mod prepared;
pub mod record;
pub mod refusal;
pub mod remove;
pub mod resume;
pub mod task;
pub(crate) mod undo;
pub mod unfinished;
pub mod unknown;
