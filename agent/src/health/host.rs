//! The controller's interface to process and probes.

use std::{net::IpAddr, path::PathBuf};

use tokio::sync::watch;
use wharf_core::endpoint::NetnsRef;

use super::{
    error::HealthError,
    launch::Process,
    probe::{self, Expected, Probed},
};

/// Process and probes; tests implement it in memory.
pub trait Host: Send + Sync + 'static {
    /// Process behind the endpoint.
    type Process: Responder;

    /// Starts a process and waits until it listens.
    ///
    /// # Errors
    /// No process is ready; a started one has ended.
    fn launch(&self, node: &str) -> impl Future<Output = Result<Self::Process, HealthError>> + Send;

    /// Sends every probe to every address; only this process's answer is correct.
    fn probe(&self, process: &Self::Process, addresses: &[IpAddr]) -> impl Future<Output = Vec<Probed>> + Send;
}

/// Answers probes in a separate network namespace.
pub trait Responder: Send + Sync + 'static {
    /// Process id.
    fn pid(&self) -> u32;

    /// Network namespace, valid while the process lives.
    fn netns_path(&self) -> PathBuf;

    /// Whether `netns` is this process's; the pid may be reused.
    fn is_in(&self, netns: &NetnsRef) -> bool;

    /// How the process ended; `None` while it lives.
    fn ended(&self) -> watch::Receiver<Option<String>>;

    /// Kills the process and waits for its end.
    fn end(self) -> impl Future<Output = ()> + Send;
}

/// Runs the agent's binary and sends real probes.
#[derive(Debug, Clone, Copy)]
pub struct ThisHost;

impl Host for ThisHost {
    type Process = Process;

    async fn launch(&self, node: &str) -> Result<Process, HealthError> {
        Process::launch(node).await
    }

    async fn probe(&self, process: &Process, addresses: &[IpAddr]) -> Vec<Probed> {
        probe::round(addresses, Expected::Nonce(process.nonce())).await
    }
}
