//! What the controller needs beside the kernel: a process behind the endpoint, and probes of its addresses.

use std::{net::IpAddr, path::PathBuf};

use tokio::sync::watch;
use wharf_core::endpoint::NetnsRef;

use super::{
    launch::Process,
    probe::{self, Probed},
};

/// Starts the process and probes its addresses. The agent uses [`ThisHost`]; lifecycle tests have one in memory.
pub trait Host: Send + Sync + 'static {
    /// The process behind the endpoint.
    type Process: Responder;

    /// Starts a process and waits until it answers probes.
    ///
    /// # Errors
    /// Why there is none; what was started has been ended.
    fn launch(&self, node: &str) -> impl Future<Output = Result<Self::Process, String>> + Send;

    /// Probes every address in every way, once. Only this process's answer is the right one.
    fn probe(&self, process: &Self::Process, addresses: &[IpAddr]) -> impl Future<Output = Vec<Probed>> + Send;
}

/// A process that answers probes, in a network namespace of its own.
pub trait Responder: Send + Sync + 'static {
    /// Process id.
    fn pid(&self) -> u32;

    /// Names its network namespace while it lives.
    fn netns_path(&self) -> PathBuf;

    /// Whether a namespace is this process's: after its end, another process can have its number.
    fn is_in(&self, netns: &NetnsRef) -> bool;

    /// How it ended; none while it lives.
    fn ended(&self) -> watch::Receiver<Option<String>>;

    /// Kills it and waits until it is gone.
    fn end(self) -> impl Future<Output = ()> + Send;
}

/// The host that the agent runs on: a process of the agent's own binary, and sockets.
#[derive(Debug, Clone, Copy)]
pub struct ThisHost;

impl Host for ThisHost {
    type Process = Process;

    async fn launch(&self, node: &str) -> Result<Process, String> {
        Process::launch(node).await
    }

    async fn probe(&self, process: &Process, addresses: &[IpAddr]) -> Vec<Probed> {
        probe::round(addresses, process.nonce()).await
    }
}
