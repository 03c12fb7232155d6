//! The compiled rows against the oracle, in a small universe of policies and flows.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod universe;
