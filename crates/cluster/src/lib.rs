//! The nodes of a cluster and this node's routes to them. Pure.
//!
//! | file | content |
//! |---|---|
//! | `nodes` | rows of nodes, and the rules that a list of them must follow |
//! | `file` | the file of `--cluster-file` |
//! | `routes` | routes to the containers of other nodes |
#![forbid(unsafe_code)]

pub mod file;
pub mod nodes;
pub mod routes;
