//! A network namespace with clients, a server, a redirect and a real Envoy.
//!
//! All addresses are on the namespace's loopback. What a client sends to the server's port is redirected to a listener
//! by nftables (tproxy), unless it carries a mark of the proxy's: so the real datapath does it, too.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part, and a test is a crate of its own")]

pub mod tls;

use std::{
    future::Future,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::Duration,
};

use nix::{
    sched::{CloneFlags, unshare},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use wharf_policy::model::Direction;
use wharf_policy::requests::{HttpRule, Pattern, Requests};
use wharf_proxy::{Envoy, Listener, Member, Proxy, Record, Watching};

pub const CLIENT: &str = "10.0.0.1";
pub const OTHER_CLIENT: &str = "10.0.0.3";
pub const STRANGER: &str = "10.0.0.9";
pub const SERVER: &str = "10.0.0.2";
pub const SERVER_ADDRESS: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));
pub const CLIENT_6: &str = "fd00::1";
pub const SERVER_6: &str = "fd00::2";
/// What the redirect is for.
pub const PORT: u16 = 80;
/// The listener of egress tests.
pub const EGRESS: u16 = 15001;
/// Enough for a machine that does other things.
pub const LONG: Duration = Duration::from_secs(20);

/// See the module.
pub struct World {
    pub proxy: Proxy,
    pub records: mpsc::Receiver<Record>,
    pub envoy: Envoy,
    /// Each request is told, unless a test takes this.
    pub watching: Option<Watching>,
    tasks: JoinSet<()>,
    stop_server: Option<oneshot::Sender<()>>,
    directory: tempfile::TempDir,
}

/// Runs the test in a namespace of its own.
pub fn in_a_namespace<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace (as root)");
            run("ip", &["link", "set", "lo", "up"]);
            for address in [CLIENT, OTHER_CLIENT, STRANGER, SERVER] {
                run("ip", &["address", "add", &format!("{address}/32"), "dev", "lo"]);
            }
            for address in [CLIENT_6, SERVER_6] {
                run("ip", &["address", "add", &format!("{address}/128"), "dev", "lo", "nodad"]);
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(test());
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Redirects what goes to the server's port, or comes to it, to the listener, but not what has the mark of its
/// direction.
pub fn redirect(listener: u16, direction: Direction) {
    let mark = wharf_proxy::mark(direction);
    run(
        "nft",
        &[&format!(
            "table inet proxied {{ chain before {{ type filter hook prerouting priority mangle; \
             meta mark & 0x300 == {mark} accept; \
             ip daddr {SERVER} tcp dport {PORT} tproxy ip to :{listener} accept; \
             ip6 daddr {SERVER_6} tcp dport {PORT} tproxy ip6 to :{listener} accept; }}; }}"
        )],
    );
}

/// What is sent to an address's port arrives at the server's, by the kernel's own translation.
pub fn publish(address: &str, port: u16) {
    run(
        "nft",
        &[&format!(
            "table ip published {{ chain out {{ type nat hook output priority -100; \
             ip daddr {address} tcp dport {port} dnat to {SERVER}:{PORT}; }}; }}"
        )],
    );
}

/// The same to another listener.
pub fn redirect_again(listener: u16, direction: Direction) {
    run("nft", &["delete table inet proxied"]);
    redirect(listener, direction);
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect(program);
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The binary, which `cargo xtask` puts there.
fn program() -> PathBuf {
    let given = std::env::var_os("WHARF_ENVOY").map(PathBuf::from);
    let path = given.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/envoy/bin/envoy"));
    assert!(path.exists(), "{} is not there: `cargo xtask test` installs it; or set WHARF_ENVOY", path.display());
    path
}

impl World {
    /// A proxy, its server, and Envoy.
    pub fn start() -> Self {
        let mut world = Self::without_envoy();
        world.supervise();
        world
    }

    pub fn without_envoy() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let envoy = Envoy {
            program: program(),
            directory: directory.path().join("envoy"),
            user: None,
            threads: 2,
            ends_with_agent: true,
        };
        let (proxy, records) = Proxy::new(1024);
        let watching = Some(proxy.watch());
        let mut world = Self { proxy, records, envoy, watching, tasks: JoinSet::new(), stop_server: None, directory };
        world.serve();
        world
    }

    pub fn serve(&mut self) {
        self.envoy.remember(&self.proxy, true).expect("what an earlier agent noted");
        let (proxy, socket) = (self.proxy.clone(), self.envoy.socket());
        let (stop, stopped) = oneshot::channel();
        self.stop_server = Some(stop);
        self.tasks.spawn(async move {
            proxy.serve(socket, async { drop(stopped.await) }).await.expect("the server");
        });
    }

    pub fn supervise(&mut self) {
        let (proxy, envoy) = (self.proxy.clone(), self.envoy.clone());
        self.tasks.spawn(async move { envoy.supervise(&proxy, std::future::pending()).await });
    }

    /// Ends the server, in order.
    pub async fn stop_server(&mut self) {
        drop(self.stop_server.take());
        tokio::time::timeout(LONG, self.tasks.join_next()).await.expect("it ends").expect("a task").expect("no panic");
    }

    /// Lets Envoy's user pass through the temporary directory.
    pub fn open_directory(&self) {
        let path = self.directory.path();
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).expect("a mode");
    }

    /// Another agent: a new proxy on the same directory, with nothing set.
    pub fn new_agent(&mut self) {
        self.tasks = JoinSet::new();
        (self.proxy, self.records) = Proxy::new(1024);
        self.watching = Some(self.proxy.watch());
    }

    /// Makes sure of the listener, and that Envoy has it.
    pub async fn ensure(&self, listener: Listener) {
        let result = self.proxy.ensure(listener).within(LONG).await;
        assert_eq!(result, Ok(()), "{:#?}", self.proxy.status());
    }

    /// The next record.
    pub async fn record(&mut self) -> Record {
        tokio::time::timeout(LONG, self.records.recv()).await.expect("a record in time").expect("a record")
    }
}

impl Drop for World {
    /// A test that fails leaves no Envoy, not even one that it stopped: that would not end with the test's thread.
    fn drop(&mut self) {
        let Ok(text) = std::fs::read_to_string(self.envoy.directory.join("envoy.pid")) else { return };
        let Some(pid) = text.split(' ').next().and_then(|pid| pid.parse().ok()) else { return };
        let directory = self.envoy.directory.display().to_string();
        if std::fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.contains(&directory)) {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
}

pub fn listener(port: u16, direction: Direction, requests: Requests, members: &[(u16, &[&str])]) -> Listener {
    let members = members.iter().map(|(id, addresses)| {
        let addresses = addresses.iter().map(|address| address.parse().expect("an address")).collect();
        (Member { id: *id, epoch: u64::from(*id) + 100 }, addresses)
    });
    Listener { port, direction, requests: Arc::new(requests), members: members.collect(), rounds: [].into() }
}

pub fn get(path: &str) -> HttpRule {
    HttpRule {
        method: Some(Pattern::Exact("GET".into())),
        path: Some(Pattern::Exact(path.into())),
        ..HttpRule::default()
    }
}

pub fn allow(rules: impl IntoIterator<Item = HttpRule>) -> Requests {
    Requests { http: rules.into_iter().collect(), ..Requests::default() }
}

/// Connects from one address to the server's port.
pub async fn connect(from: &str, to: &str) -> TcpStream {
    try_connect(from, to).await.expect("a connection")
}

pub async fn try_connect(from: &str, to: &str) -> std::io::Result<TcpStream> {
    let (from, to): (IpAddr, IpAddr) = (from.parse().expect("an address"), to.parse().expect("an address"));
    let socket = if from.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind(SocketAddr::new(from, 0))?;
    tokio::time::timeout(LONG, socket.connect(SocketAddr::new(to, PORT))).await.expect("in time")
}

/// Sends bytes and reads what comes back until the other side closes.
pub async fn exchange(mut stream: TcpStream, sent: &[u8]) -> String {
    let whole = async {
        // A peer that closes at once may make either fail.
        let mut got = Vec::new();
        if stream.write_all(sent).await.is_ok() {
            drop(stream.read_to_end(&mut got).await);
        }
        String::from_utf8_lossy(&got).into_owned()
    };
    tokio::time::timeout(LONG, whole).await.expect("an answer in time")
}

/// An HTTP/1.1 request on a connection of its own.
pub async fn request(from: &str, head: &str) -> String {
    exchange(connect(from, SERVER).await, format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).await
}

/// A server that sends back every byte.
pub async fn byte_server(address: &str) -> JoinSet<()> {
    let listener = TcpListener::bind((address, PORT)).await.expect("the server's port");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            connections.spawn(async move {
                let (mut reader, mut writer) = stream.split();
                drop(tokio::io::copy(&mut reader, &mut writer).await);
            });
        }
    });
    tasks
}

/// A server that answers each request with the client's address and the head as it came.
pub async fn echo_server(address: &str) -> JoinSet<()> {
    let listener = TcpListener::bind((address, PORT)).await.expect("the server's port");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (stream, peer) = listener.accept().await.expect("a connection");
            connections.spawn(echo(stream, peer));
        }
    });
    tasks
}

async fn echo(mut stream: TcpStream, peer: SocketAddr) {
    let (mut buffer, mut head) = ([0; 4096], Vec::new());
    while let Ok(length @ 1..) = stream.read(&mut buffer).await {
        head.extend(&buffer[..length]);
        let Some(end) = head.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&head[..end + 4]).into_owned();
        head.drain(..end + 4);
        let websocket = text.to_lowercase().contains("upgrade: websocket");
        let answer = if websocket {
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n".to_owned()
        } else {
            let body = format!("peer {}\n{text}", peer.ip());
            format!(
                "HTTP/1.1 200 OK\r\nServer: echo\r\nX-Mixed-Case: yes\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            )
        };
        if stream.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
        if websocket {
            let (mut reader, mut writer) = stream.split();
            drop(tokio::io::copy(&mut reader, &mut writer).await);
            return;
        }
    }
}
