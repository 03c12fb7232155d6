//! Network policy: which endpoint may talk to whom.
//!
//! | module | content |
//! |---|---|
//! | [`model`] | what documents of every format become: policies, rules, peers, ports, each with the place where it was written |
//! | [`requests`], [`names`] | what a rule says above ports and addresses: HTTP requests, TLS server names, names of DNS |
//! | [`read`] | documents to the model: `NetworkPolicy`, `ClusterNetworkPolicy`, Cilium-style rules |
//! | [`oracle`] | the verdict about one flow, evaluated directly: short and slow; what tests compare with |
//! | [`compile`] | the model to rows, and what changes between two states |
//!
//! Nothing here knows the kernel, the agent or time.

pub mod compile;
pub mod model;
pub mod names;
pub mod oracle;
pub mod read;
pub mod requests;
