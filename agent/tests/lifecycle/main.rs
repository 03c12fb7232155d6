//! The life of endpoints, on the fake kernel and a real store.
//!
//! What is proven here is the agent's own order, undo, bounds and memory; what the kernel makes of its calls is proven
//! by the scenarios of the crate `tests`. Time: nothing here sleeps to let something happen; calls are held and
//! released, and where a deadline is the subject it is a short one or tokio's clock is moved by hand.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod abandoned;
mod answered;
mod audit;
mod bandwidth;
mod build;
mod chained;
mod clock;
mod cluster;
mod controllers;
mod crash;
mod create;
mod create_undone;
mod delete;
mod delete_many;
mod delete_races;
mod deletions;
mod explain;
mod external;
mod faults;
mod feed;
mod flows;
mod gc;
mod gone_caller;
mod health;
mod identifiers;
mod identity;
mod init;
mod leak_audit;
mod mtu;
mod names;
mod orphans;
mod out_of_service;
mod overload;
mod own_doing;
mod pods;
mod policy;
mod policy_facts;
mod policy_lost;
mod pools;
mod ports;
mod redirects;
mod resting;
mod restore;
mod selfcheck;
mod sources;
mod store;
mod support;
