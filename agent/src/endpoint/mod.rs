//! An endpoint's life: one task owns it, others send it commands and read its picture.
//!
//! | task | inputs | outputs |
//! |---|---|---|
//! | endpoint | mailbox ([`task::Command`]), build permits, stop token | kernel and store changes, [`view::Shared`], replies |
//! | deleter ([`delete`]) | the endpoints to delete | one store transaction for all of them, the client's answer |

pub mod build;
mod claim;
pub mod create;
pub mod delete;
pub mod look;
pub mod task;
pub(crate) mod undo;
pub mod view;

pub use view::Handle;
