//! A node between a client and a server, each in a network namespace of its own, with a proxy on the node.
//!
//! The node's nftables hand what the client sends to port 53 to the proxy's port (tproxy), and bring to its sockets
//! what the server sends to the client's addresses. What leaves the node for the server without the proxy's mark is
//! dropped. The node forwards nothing.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part, and a test is a crate of its own")]

pub mod message;
pub mod resolver;

use std::{
    collections::BTreeMap,
    future::Future,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    process::Command,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use nix::{
    sched::{CloneFlags, unshare},
    unistd::gettid,
};
use tokio::{
    net::{TcpSocket, TcpStream, UdpSocket},
    sync::Notify,
};
use wharf_dns::{Answer, DnsProxy, Listener, Member, Names, Outcome, Record};

/// A member's addresses, and the address of another one.
pub const CLIENT: &str = "10.1.0.2";
pub const CLIENT_6: &str = "fd01::2";
pub const OTHER_CLIENT: &str = "10.1.0.3";
/// In the client's namespace, but no member's.
pub const STRANGER: &str = "10.1.0.9";
pub const SERVER: &str = "10.2.0.2";
pub const SERVER_6: &str = "fd02::2";
/// The server's second address.
pub const IMPOSTOR: &str = "10.2.0.3";
/// The node's address at the client's link.
pub const NODE: &str = "10.1.0.1";
pub const NODE_6: &str = "fd01::1";
/// The proxy's port.
pub const PORT: u16 = 15353;
/// Enough for a machine that does other things.
pub const LONG: Duration = Duration::from_secs(20);
/// Enough to see that nothing comes.
pub const SHORT: Duration = Duration::from_millis(300);

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace, kept by a thread that runs what belongs there.
pub struct Space {
    jobs: Option<mpsc::SyncSender<Job>>,
    thread: Option<std::thread::JoinHandle<()>>,
    /// The thread, as `ip link ... netns` wants it.
    tid: i32,
}

impl Space {
    fn new() -> Self {
        // The maker waits for each job.
        let (jobs, queue) = mpsc::sync_channel::<Job>(1);
        let (tell, tid) = mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace (as root)");
            tell.send(gettid().as_raw()).expect("the maker waits");
            for job in queue {
                job();
            }
        });
        Self { jobs: Some(jobs), thread: Some(thread), tid: tid.recv().expect("the thread's id") }
    }

    /// Runs it in the namespace. Sockets that it makes stay there.
    pub fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (tell, result) = mpsc::sync_channel(1);
        let job = Box::new(move || tell.send(job()).expect("the caller waits"));
        self.jobs.as_ref().expect("a thread").send(job).expect("a thread");
        result.recv().expect("the job's result")
    }

    /// Runs `ip` there.
    pub fn ip(&self, arguments: &'static str) {
        self.run(move || ip(arguments));
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.jobs.take();
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

/// Runs `ip` in the node's namespace, where the test is.
pub fn ip(arguments: &str) {
    run("ip", &arguments.split(' ').collect::<Vec<_>>());
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect(program);
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// See the module.
pub struct World {
    pub proxy: DnsProxy,
    pub records: tokio::sync::mpsc::Receiver<Record>,
    pub node: Arc<Node>,
    pub client: Space,
    pub server: Space,
}

/// Runs the test on the node.
pub fn in_a_world<F: Future<Output = ()>>(test: impl FnOnce(World) -> F + Send) {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).expect("a network namespace (as root)");
            let (client, server) = (Space::new(), Space::new());
            ip("link set lo up");
            link("c0", &client, "10.1.0.1/24", "fd01::1/64");
            link("s0", &server, "10.2.0.1/24", "fd02::1/64");
            for address in ["10.1.0.2/24", "10.1.0.3/24", "10.1.0.9/24", "fd01::2/64"] {
                client.run(move || add(address, "eth0"));
            }
            for address in ["10.2.0.2/24", "10.2.0.3/24", "fd02::2/64"] {
                server.run(move || add(address, "eth0"));
            }
            for (space, v4, v6) in [(&client, "10.1.0.1", "fd01::1"), (&server, "10.2.0.1", "fd02::1")] {
                space.run(move || {
                    ip("link set lo up");
                    ip(&format!("route add default via {v4}"));
                    ip(&format!("-6 route add default via {v6}"));
                });
            }
            for family in ["-4", "-6"] {
                ip(&format!("{family} rule add fwmark 0x80/0x80 lookup 99"));
                ip(&format!("{family} route add local default dev lo table 99"));
            }
            redirect();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let node = Arc::new(Node::default());
                let (proxy, records) = DnsProxy::new(Arc::clone(&node) as Arc<dyn Names>, 4096);
                test(World { proxy, records, node, client, server }).await;
            });
        });
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}

fn link(name: &str, space: &Space, v4: &str, v6: &str) {
    ip(&format!("link add {name} type veth peer name eth0 netns {}", space.tid));
    // The kernel's own link-local addresses would be checked for duplicates for a second.
    space.run(|| {
        ip("link set eth0 addrgenmode none up");
        add("fe80::2/64", "eth0");
    });
    ip(&format!("link set {name} addrgenmode none up"));
    add("fe80::1/64", name);
    add(v4, name);
    add(v6, name);
}

fn add(address: &str, device: &str) {
    let nodad = if address.contains(':') { " nodad" } else { "" };
    ip(&format!("address add {address} dev {device}{nodad}"));
}

fn redirect() {
    let rules = format!(
        "table inet redirects {{
           chain redirected {{ type filter hook prerouting priority -150;
             iifname c0 meta l4proto {{ tcp, udp }} socket transparent 1 socket wildcard 0 meta mark set 0x80 accept
             iifname c0 meta nfproto ipv4 meta l4proto {{ tcp, udp }} th dport 53 tproxy ip to 127.0.0.1:{PORT} meta mark set 0x80
             iifname c0 meta nfproto ipv6 meta l4proto {{ tcp, udp }} th dport 53 tproxy ip6 to [::1]:{PORT} meta mark set 0x80
           }}
           chain answers {{ type filter hook prerouting priority -50;
             iifname c0 return
             fib daddr type local return
             socket wildcard 1 return
             socket transparent 1 meta mark set meta mark | 0x80
           }}
           chain marked {{ type filter hook output priority 0;
             oifname s0 meta l4proto {{ tcp, udp }} th dport 53 meta mark & 0x100 == 0 drop
           }}
         }}"
    );
    run("nft", &[&rules]);
}

/// Takes note of addresses as the test wants it.
#[derive(Default)]
pub struct Node {
    pub learned: Mutex<Vec<Answer>>,
    act: Mutex<Act>,
    /// Told for each address list that [`Act::Wait`] may let through.
    pub go: Notify,
}

#[derive(Default, Clone, Copy)]
pub enum Act {
    #[default]
    Learn,
    Wait,
    Fail,
    Never,
}

impl Node {
    pub fn will(&self, act: Act) {
        *self.act.lock().expect("no panic") = act;
    }

    pub fn take(&self) -> Vec<Answer> {
        std::mem::take(&mut self.learned.lock().expect("no panic"))
    }
}

impl Names for Node {
    fn learn<'a>(&'a self, answer: Answer) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send + 'a>> {
        let act = *self.act.lock().expect("no panic");
        Box::pin(async move {
            self.learned.lock().expect("no panic").push(answer);
            match act {
                Act::Learn => Ok(()),
                Act::Wait => {
                    self.go.notified().await;
                    Ok(())
                }
                Act::Fail => Err("the map is full".into()),
                Act::Never => std::future::pending().await,
            }
        })
    }
}

/// The members 7 and 8; names that may be asked end in `.test`.
pub fn listener() -> Listener {
    let ips = |list: &[&str]| list.iter().map(|ip| ip.parse().expect("an address")).collect();
    let members = BTreeMap::from([
        (Member { id: 7, epoch: 107 }, ips(&[CLIENT, CLIENT_6])),
        (Member { id: 8, epoch: 108 }, ips(&[OTHER_CLIENT])),
    ]);
    Listener { asks: Arc::new(|name| name.ends_with(".test")), members, rounds: BTreeMap::new() }
}

impl World {
    /// Serves [`listener`] at [`PORT`].
    pub async fn serve(&self) {
        self.set([PORT]).await;
    }

    /// Serves [`listener`] at these ports, which must work.
    pub async fn set<const N: usize>(&self, ports: [u16; N]) {
        for (port, result) in self.proxy.set(ports.map(|port| (port, listener())).into()).await {
            assert!(result.is_ok(), "{port}: {result:?}");
        }
    }

    /// A client's socket that speaks to one server.
    pub async fn udp(&self, from: &str, to: &str) -> UdpSocket {
        let (from, to): (IpAddr, IpAddr) = (from.parse().expect("an address"), to.parse().expect("an address"));
        let socket = self.client.run(move || {
            let socket = std::net::UdpSocket::bind((from, 0)).expect("a socket");
            socket.connect((to, 53)).expect("a way");
            socket.set_nonblocking(true).expect("nonblocking");
            socket
        });
        UdpSocket::from_std(socket).expect("a socket")
    }

    /// A client's connection to a server.
    pub async fn tcp(&self, from: &str, to: &str) -> TcpStream {
        let (from, to): (IpAddr, IpAddr) = (from.parse().expect("an address"), to.parse().expect("an address"));
        let socket = self.client.run(move || {
            let socket = if from.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }.expect("a socket");
            socket.bind(SocketAddr::new(from, 0)).expect("an address");
            socket
        });
        let connection = socket.connect(SocketAddr::new(to, 53));
        tokio::time::timeout(LONG, connection).await.expect("in time").expect("a connection")
    }

    /// Asks by UDP and gives the answer.
    pub async fn ask(&self, from: &str, to: &str, query: &[u8]) -> Vec<u8> {
        let socket = self.udp(from, to).await;
        socket.send(query).await.expect("sent");
        receive(&socket).await
    }

    /// The next record.
    pub async fn record(&mut self) -> Record {
        tokio::time::timeout(LONG, self.records.recv()).await.expect("a record in time").expect("a record")
    }

    pub async fn outcome(&mut self) -> Outcome {
        self.record().await.outcome
    }
}

/// The next datagram.
pub async fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65_535];
    let length = tokio::time::timeout(LONG, socket.recv(&mut buffer)).await.expect("an answer").expect("an answer");
    buffer.truncate(length);
    buffer
}

/// Makes sure that nothing comes.
pub async fn silence(socket: &UdpSocket) {
    let mut buffer = [0; 512];
    let received = tokio::time::timeout(SHORT, socket.recv(&mut buffer)).await;
    assert!(received.is_err(), "{received:?} {buffer:?}");
}
