//! `wharf-kube` against a scripted API server and a fake agent. One program, because each links all of `wharf-kube`.

#![allow(
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking; the modules are no interface"
)]

mod common;
mod history;
mod node;
mod process;
mod tls;
mod watch;
