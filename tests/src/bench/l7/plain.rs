//! Envoy as anybody would run it before one server: nothing but HTTP and a route.

use std::{
    fs,
    net::SocketAddr,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, Stdio},
};

use anyhow::{Context, Result};
use nix::unistd::setsid;
use serde_json::{Value, json};

use crate::{envoy, process::command_in, space::Space, wait};

/// A reverse proxy; killed when dropped.
pub(super) struct Plain(Child);

impl Plain {
    /// Starts one, with as many threads as an agent's Envoy has, and waits until it listens.
    pub(super) fn start(space: &Space, directory: &Path, at: SocketAddr, server: SocketAddr) -> Result<Self> {
        let file = directory.join("plain-envoy.json");
        fs::write(&file, bootstrap(at, server).to_string()).context("write a bootstrap")?;
        let mut command = command_in(space, envoy::program()?)?;
        command.arg("--config-path").arg(&file).args(["--concurrency", "2", "--log-level", "error"]);
        command.arg("--disable-hot-restart").stdin(Stdio::null());
        // A session of its own, as the agent's Envoy has: the scheduler shares processors among sessions (sched(7),
        // autogroups).
        let own_session = || setsid().map(drop).map_err(Into::into);
        // SAFETY: between fork and exec the closure makes one system call; it allocates nothing.
        unsafe { command.pre_exec(own_session) };
        let plain = Self(command.spawn().context("start Envoy as a reverse proxy")?);
        wait::until("the reverse proxy listens", || {
            Ok(space.run(|| std::net::TcpStream::connect_timeout(&at, wait::PATIENCE))?.is_ok().then_some(()))
        })?;
        Ok(plain)
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // An error means that it has ended by itself.
        if self.0.kill().is_ok() {
            self.0.wait().ok();
        }
    }
}

fn address(at: SocketAddr) -> Value {
    json!({"socket_address": {"address": at.ip(), "port_value": at.port()}})
}

fn bootstrap(at: SocketAddr, server: SocketAddr) -> Value {
    let manager = json!({
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "plain",
        "http_filters": [{
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        }],
        "route_config": {"virtual_hosts": [{
            "name": "any",
            "domains": ["*"],
            "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "server"}}],
        }]},
    });
    json!({"static_resources": {
        "listeners": [{
            "name": "plain",
            "address": address(at),
            "filter_chains": [{"filters": [
                {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager},
            ]}],
        }],
        "clusters": [{
            "name": "server",
            "type": "STATIC",
            "load_assignment": {"cluster_name": "server", "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": address(server)}}]},
            ]},
        }],
    }})
}
