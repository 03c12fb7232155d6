//! Flows that send all the time, so that they are in the cache of the programs when something changes.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use wharf_api::FlowList;
use wharf_tests::{Node, NodeConfig, echo, scenario, wait};

use crate::{
    gaps::POOLS,
    pods::{Pod, import, network_policy, relabel},
};

/// Between two datagrams.
const PAUSE: Duration = Duration::from_micros(200);

/// A thread that sends or answers until it is stopped.
struct Worker {
    stop: Arc<AtomicBool>,
    /// Number of the latest datagram: begun to be sent, or received.
    latest: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start(mut work: impl FnMut(&AtomicU64) + Send + 'static) -> Self {
        let (stop, latest) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, number) = (Arc::clone(&stop), Arc::clone(&latest));
        let thread = std::thread::spawn(move || {
            while !stopped.load(SeqCst) {
                work(&number);
            }
        });
        Self { stop, latest, thread: Some(thread) }
    }

    fn latest(&self) -> u64 {
        self.latest.load(SeqCst)
    }

    fn await_number(&self, number: u64) -> Result<()> {
        wait::until(&format!("datagram {number}"), || Ok((self.latest() >= number).then_some(())))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sends numbers. What happens to them is the test's question.
fn sender(client: &Pod, server: SocketAddr) -> Result<Worker> {
    let socket = echo::udp_client(client.space()?, server)?;
    socket.set_nonblocking(true)?;
    Ok(Worker::start(move |latest| {
        let number = latest.fetch_add(1, SeqCst) + 1;
        // The first call may return the error of an earlier datagram.
        if socket.send(&number.to_be_bytes()).is_err() {
            // While nobody has the address, this fails too.
            let _ = socket.send(&number.to_be_bytes());
        }
        while socket.recv(&mut [0; 8]).is_ok() {}
        std::thread::sleep(PAUSE);
    }))
}

/// Answers numbers.
fn answerer(socket: UdpSocket) -> Result<Worker> {
    socket.set_read_timeout(Some(Duration::from_millis(20)))?;
    Ok(Worker::start(move |latest| {
        let mut number = [0; 8];
        if let Ok((8, from)) = socket.recv_from(&mut number) {
            latest.fetch_max(u64::from_be_bytes(number), SeqCst);
            // The client may not be reached: its policy is the test's subject.
            let _ = socket.send_to(&number, from);
        }
    }))
}

fn bind(server: &Pod, to: SocketAddr) -> Result<UdpSocket> {
    server.space()?.run(|| UdpSocket::bind(to))?.with_context(|| format!("bind {to}"))
}

fn takes_stack(node: &Node, to: SocketAddr) -> Result<bool> {
    let (address, port) = (to.ip().to_string(), to.port().to_string());
    let filters = ["bpf", "ct", "list", "-o", "json", "--address", &address, "--port", &port];
    let list: FlowList = serde_json::from_str(&node.wharf(&filters)?.ok()?)?;
    ensure!(!list.flows.is_empty(), "no flow to {to}");
    Ok(list.flows.iter().any(|flow| flow.by_stack))
}

/// With so many datagrams more, a flow is in the cache.
const MANY: u64 = 50;

#[test]
fn a_busy_flow_is_cut_at_once() -> Result<()> {
    for delivery in ["direct", "stack"] {
        scenario(NodeConfig::default().flags(&[&format!("--local-delivery={delivery}")]), |node| {
            let (web, db) = (Pod::container(node, "web", "web")?, Pod::container(node, "db", "db")?);
            let front_end = network_policy(
                "db",
                "{podSelector: {matchLabels: {app: db}}, ingress: [{from: [{podSelector: {matchLabels: {app: web}}}]}]}",
            );
            let nobody = network_policy("db", "{podSelector: {matchLabels: {app: db}}}");
            for address in db.end.both()? {
                let socket = bind(&db, SocketAddr::new(address, 0))?;
                let server = socket.local_addr()?;
                let receives = answerer(socket)?;
                let sends = sender(&web, server)?;
                type Change<'a> = &'a dyn Fn(&Node) -> Result<()>;
                let changes: [(Change<'_>, Change<'_>); 2] = [
                    (&|node| import(node, &nobody).map(drop), &|node| import(node, &front_end).map(drop)),
                    (&|node| relabel(node, &web.end, &["cni:app=other"]), &|node| {
                        relabel(node, &web.end, &["cni:app=web"])
                    }),
                ];
                for (tighten, loosen) in changes {
                    receives.await_number(sends.latest() + MANY)?;
                    tighten(node)?;
                    // Begun before, so that it may have been sent before.
                    let last = sends.latest();
                    sends.await_number(last + MANY)?;
                    let received = receives.latest();
                    ensure!(
                        received <= last,
                        "{server}, {delivery}: {received} arrived, {last} may have been sent before"
                    );
                    loosen(node)?;
                }
                receives.await_number(sends.latest() + MANY)?;
            }
            [web, db].iter().try_for_each(|pod| node.detach(&pod.end))
        })?;
    }
    Ok(())
}

#[test]
fn a_busy_flow_to_an_address_reaches_who_has_it_at_once() -> Result<()> {
    scenario(NodeConfig::default().flags(&POOLS), |node| {
        let web = Pod::container(node, "web", "web")?;
        let mut server = Pod::container(node, "first", "db")?;
        let address = IpAddr::from(server.end.v4()?);
        let socket = bind(&server, SocketAddr::new(address, 0))?;
        let to = socket.local_addr()?;
        let sends = sender(&web, to)?;
        let mut receives = answerer(socket)?;
        let mut others = Vec::new();
        for round in 0..3 {
            receives.await_number(sends.latest() + MANY)?;
            drop(receives);
            node.detach(&server.end)?;
            server = loop {
                let pod = Pod::container(node, &format!("next{round}-{}", others.len()), "db")?;
                if pod.end.addresses().contains(&address) {
                    break pod;
                }
                others.push(pod);
            };
            let socket = bind(&server, to)?;
            // The next one is sent to the socket.
            let bound = sends.latest();
            let mut first = [0; 8];
            socket.set_read_timeout(Some(wait::PATIENCE))?;
            socket.recv(&mut first).context("nothing reaches the one that has the address")?;
            let first = u64::from_be_bytes(first);
            ensure!(first <= bound + 1, "{first} is the first to arrive, {bound} was sent before");
            receives = answerer(socket)?;
            ensure!(!takes_stack(node, to)?, "round {round}: the flow takes the node's stack");
        }
        drop(receives);
        others.extend([web, server]);
        others.iter().try_for_each(|pod| node.detach(&pod.end))
    })
}
