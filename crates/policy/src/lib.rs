//! Network policy: which endpoint may talk to which peer.
//!
//! | module | content |
//! |---|---|
//! | [`model`] | policies, independent of their document format |
//! | [`requests`], [`names`] | HTTP requests, TLS server names, DNS names |
//! | [`read`] | documents to the model |
//! | [`oracle`] | evaluates one flow: the reference for tests |
//! | [`compile`] | the model to rows, and the changes between two states |
//!
//! Independent of the kernel, the agent and time.

pub mod compile;
pub mod model;
pub mod names;
pub mod oracle;
pub mod read;
pub mod requests;
