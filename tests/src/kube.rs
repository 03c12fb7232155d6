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

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::{Child, Stdio},
};

use anyhow::{Context as _, Result};
use tokio::runtime::Runtime;

use self::server::Server;
use crate::{
    Node,
    process::{bin, command_in},
};

/// Where [`Program`] serves its metrics, in the node's namespace.
const METRICS: &str = "127.0.0.1:9967";

/// The program; killed when dropped.
#[derive(Debug)]
pub struct Program(Child);

impl Program {
    /// Starts it for the node `own`. Its log is `wharf-kube.log` in the root of the node's directories.
    ///
    /// # Errors
    /// When it is not built.
    pub fn start(node: &Node, own: &str, feed: &Path, server: SocketAddr) -> Result<Self> {
        let root = &node.dirs().root;
        let kubeconfig = root.join("kubeconfig");
        let text = format!(
            "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: \"http://{server}\"}}}}]\n\
             users: [{{name: u, user: {{token: secret}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
             current-context: x\n"
        );
        fs::write(&kubeconfig, text).context("write the kubeconfig")?;
        let mut command = command_in(node.space(), bin("wharf-kube")?)?;
        command.arg(format!("--node-name={own}")).arg(format!("--feed={}", feed.display()));
        command.arg(format!("--kubeconfig={}", kubeconfig.display())).arg(format!("--metrics-listen={METRICS}"));
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
    let listener = node.space().run(|| TcpListener::bind("127.0.0.1:0"))?.context("bind the API server")?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let server = server.clone();
    let answer = move |request: axum::extract::Request| {
        let server = server.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap_or_default();
            let target = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
            match server.answer(parts.method, target, body).await {
                Ok(answer) => answer.map(axum::body::Body::new),
                Err(_) => streams::status(500, None).map(axum::body::Body::new),
            }
        }
    };
    let _inside = runtime.enter();
    let listener = tokio::net::TcpListener::from_std(listener)?;
    runtime.spawn(async { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    Ok(address)
}
