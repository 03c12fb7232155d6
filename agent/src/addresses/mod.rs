//! Addresses: leased, given back, rested; and compared with what the node's own networks have.

pub mod pools;
pub mod resting;
