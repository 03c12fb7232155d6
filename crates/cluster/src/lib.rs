//! The rows of a cluster (nodes, pods, namespaces, policies) and this node's routes to the other nodes. Pure.
//!
//! | file | content |
//! |---|---|
//! | `nodes` | rows of nodes, and the rules that a list of them must follow |
//! | `file` | the file of `--cluster-file` |
//! | `routes` | routes to the containers of other nodes |
//! | `paths` | which direct paths carry packets of containers |
//! | `pools` | when a node's pools follow the pod CIDRs of its row |
//! | `feed` | rows of the cluster feed, and which of them are in force |
#![forbid(unsafe_code)]

pub mod feed;
pub mod file;
pub mod nodes;
pub mod paths;
pub mod pools;
pub mod routes;
