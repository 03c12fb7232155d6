//! What the controller needs beside the kernel: a process behind the endpoint, and probes of its addresses.

use std::{net::IpAddr, path::PathBuf};

use tokio::sync::watch;
use wharf_core::endpoint::NetnsRef;

use super::{
    error::HealthError,
    launch::Process,
    probe::{self, Probed},
};

/// Starts the process and probes its addresses. The agent uses [`ThisHost`]; lifecycle tests use an in-memory host.
pub trait Host: Send + Sync + 'static {
    /// The process behind the endpoint.
    type Process: Responder;

    /// Starts a process and waits until it answers probes.
    ///
    /// # Errors
    /// Why no process is ready; a process that was started has been ended.
    fn launch(&self, node: &str) -> impl Future<Output = Result<Self::Process, HealthError>> + Send;

    /// Probes every address with every kind of probe, once. Only an answer from this process is correct.
    fn probe(&self, process: &Self::Process, addresses: &[IpAddr]) -> impl Future<Output = Vec<Probed>> + Send;
}

/// A process that answers probes, in a network namespace of its own.
pub trait Responder: Send + Sync + 'static {
    /// Process id.
    fn pid(&self) -> u32;

    /// Path of its network namespace; valid while the process lives.
    fn netns_path(&self) -> PathBuf;

    /// Whether `netns` is this process's namespace. After the process ends, another process can get its pid.
    fn is_in(&self, netns: &NetnsRef) -> bool;

    /// How the process ended; `None` while it lives.
    fn ended(&self) -> watch::Receiver<Option<String>>;

    /// Kills the process and waits for its end.
    fn end(self) -> impl Future<Output = ()> + Send;
}

/// The host that the agent runs on: a process of the agent's own binary, and sockets.
#[derive(Debug, Clone, Copy)]
pub struct ThisHost;

impl Host for ThisHost {
    type Process = Process;

    async fn launch(&self, node: &str) -> Result<Process, HealthError> {
        Process::launch(node).await
    }

    async fn probe(&self, process: &Process, addresses: &[IpAddr]) -> Vec<Probed> {
        probe::round(addresses, process.nonce()).await
    }
}
