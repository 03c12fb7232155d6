//! `wharf-kube` in the namespace of a node, with the scripted API server of its own tests.
#![allow(
    unreachable_pub,
    dead_code,
    clippy::expect_used,
    clippy::panic,
    reason = "as in the suite of wharf-kube, whose modules it has; it needs less of them"
)]

#[path = "../../kube/tests/suite/common/objects.rs"]
pub mod objects;
#[path = "../../kube/tests/suite/common/patch.rs"]
mod patch;
#[path = "../../kube/tests/suite/common/rbac.rs"]
mod rbac;
#[path = "../../kube/tests/suite/common/server.rs"]
pub mod server;
#[path = "../../kube/tests/suite/common/streams.rs"]
pub mod streams;
#[path = "../../kube/tests/suite/common/tls.rs"]
pub mod tls;

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result};
use tokio::runtime::Runtime;

use self::{
    server::Server,
    tls::{Secrets, kubeconfig},
};
use crate::{
    Node,
    process::{bin, command_in},
    space::Space,
};

/// Where [`Program`] serves its metrics, in the node's namespace.
const METRICS: &str = "127.0.0.1:9967";

/// The program; killed when dropped.
#[derive(Debug)]
pub struct Program(Child);

impl Program {
    /// Starts it for the node `own`, with a server that [`serve`] made. Its log is `wharf-kube.log` in the root of the
    /// node's directories.
    ///
    /// # Errors
    /// When it is not built.
    pub fn start(node: &Node, own: &str, feed: &Path, server: SocketAddr) -> Result<Self> {
        Self::start_with(node, own, feed, &kubeconfig(&format!("http://{server}"), None))
    }

    /// As [`Self::start`], with the text of a kubeconfig.
    ///
    /// # Errors
    /// When it is not built.
    pub fn start_with(node: &Node, own: &str, feed: &Path, config: &str) -> Result<Self> {
        let root = &node.dirs().root;
        let path = root.join("kubeconfig");
        fs::write(&path, config).context("write the kubeconfig")?;
        let mut command = command_in(node.space(), bin("wharf-kube")?)?;
        command.arg(format!("--node-name={own}")).arg(format!("--feed={}", feed.display()));
        command.arg(format!("--kubeconfig={}", path.display())).arg(format!("--metrics-listen={METRICS}"));
        let log = File::options().create(true).append(true).open(root.join("wharf-kube.log"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(Self(command.spawn().context("start wharf-kube")?))
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Its metrics.
    ///
    /// # Errors
    /// When it does not serve.
    pub fn metrics(node: &Node) -> Result<String> {
        let mut text = String::new();
        node.space().run(|| {
            let mut stream = TcpStream::connect(METRICS).context("connect to the metrics of wharf-kube")?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
            stream.read_to_string(&mut text).context("read the metrics of wharf-kube")
        })??;
        Ok(text)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves in the node's namespace while the runtime lives.
///
/// # Errors
/// When no port can be bound.
pub fn serve(node: &Node, runtime: &Runtime, server: &Server) -> Result<SocketAddr> {
    serve_at(node.space(), Ipv4Addr::LOCALHOST.into(), runtime, server, None)
}

/// Serves at an address of a namespace while the runtime lives; with secrets, by TLS.
///
/// # Errors
/// When no port can be bound.
pub fn serve_at(
    space: &Space,
    address: IpAddr,
    runtime: &Runtime,
    server: &Server,
    secrets: Option<Secrets>,
) -> Result<SocketAddr> {
    let listener = space.run(|| TcpListener::bind((address, 0)))?.context("bind the API server")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let _inside = runtime.enter();
    tls::listen(server, tokio::net::TcpListener::from_std(listener)?, secrets);
    Ok(address)
}
