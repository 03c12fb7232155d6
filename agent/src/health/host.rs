//! The controller's interface to the host: process and probes.

use std::{net::IpAddr, path::PathBuf};

use tokio::sync::watch;
use wharf_core::endpoint::NetnsRef;

use super::{
    error::HealthError,
    launch::Process,
    probe::{self, Probed},
};

/// Starts the process and probes its addresses. Tests use an in-memory host instead of [`ThisHost`].
pub trait Host: Send + Sync + 'static {
    /// The process behind the endpoint.
    type Process: Responder;

    /// Starts a process and waits until it answers probes.
    ///
    /// # Errors
    /// When no process is ready; a started one has been ended.
    fn launch(&self, node: &str) -> impl Future<Output = Result<Self::Process, HealthError>> + Send;

    /// Sends every kind of probe to every address. Only this process's answer is correct.
    fn probe(&self, process: &Self::Process, addresses: &[IpAddr]) -> impl Future<Output = Vec<Probed>> + Send;
}

/// A process that answers probes in a separate network namespace.
pub trait Responder: Send + Sync + 'static {
    /// Process id.
    fn pid(&self) -> u32;

    /// The network namespace; valid while the process lives.
    fn netns_path(&self) -> PathBuf;

    /// Whether `netns` is this process's namespace; another process may get the pid later.
    fn is_in(&self, netns: &NetnsRef) -> bool;

    /// How the process ended; `None` while it lives.
    fn ended(&self) -> watch::Receiver<Option<String>>;

    /// Kills the process and waits for its end.
    fn end(self) -> impl Future<Output = ()> + Send;
}

/// The agent's host: its binary as the process, and sockets.
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
