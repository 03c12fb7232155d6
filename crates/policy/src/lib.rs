//! Network policy: which endpoint may talk to which peer.
//!
//! | module | content |
//! |---|---|
//! | [`model`] | policies, rules, peers and ports, read from documents of any format, with source locations |
//! | [`requests`], [`names`] | rules above ports and addresses: HTTP requests, TLS server names, DNS names |
//! | [`read`] | documents to the model: `NetworkPolicy`, `ClusterNetworkPolicy`, Cilium rules |
//! | [`oracle`] | direct evaluation of one flow: short and slow; the reference for tests |
//! | [`compile`] | the model to rows, and the changes between two states |
//!
//! Independent of the kernel, the agent and time.

pub mod compile;
pub mod model;
pub mod names;
pub mod oracle;
pub mod read;
pub mod requests;
