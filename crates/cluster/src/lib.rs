//! A cluster's rows (nodes, pods, namespaces, policies), and this node's routes to other nodes. Pure.
#![forbid(unsafe_code)]

pub mod feed;
pub mod file;
pub mod nodes;
pub mod paths;
pub mod pools;
pub mod routes;
