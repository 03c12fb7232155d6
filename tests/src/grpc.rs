//! gRPC's health service: unary calls, and a stream of the server.

use std::net::{Ipv6Addr, SocketAddr, TcpListener};

use anyhow::{Context as _, Result};
use tokio::{
    net::TcpListener as Incoming,
    runtime::{Builder, Runtime},
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Server;
use tonic_health::{
    ServingStatus,
    server::{HealthReporter, health_reporter},
};

use crate::space::Space;

/// A health service on every address of its namespace; ended when dropped.
#[derive(Debug)]
pub struct HealthService {
    runtime: Runtime,
    reporter: HealthReporter,
}

impl HealthService {
    /// Starts one at a port. It knows no service yet.
    ///
    /// # Errors
    /// When no socket can be bound.
    pub fn start(space: &Space, port: u16) -> Result<Self> {
        let listener = space.run(|| TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))))?;
        let listener = listener.context("bind the gRPC service")?;
        listener.set_nonblocking(true).context("make the listener non-blocking")?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let (reporter, service) = health_reporter();
        {
            let _inside = runtime.enter();
            let incoming = TcpListenerStream::new(Incoming::from_std(listener).context("listen")?);
            runtime.spawn(async move {
                if let Err(error) = Server::builder().add_service(service).serve_with_incoming(incoming).await {
                    eprintln!("the gRPC service: {error}");
                }
            });
        }
        Ok(Self { runtime, reporter })
    }

    /// From now on, the service of this name serves, or does not.
    pub fn report(&self, name: &str, serves: bool) {
        let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.runtime.block_on(self.reporter.set_service_status(name, status));
    }
}
