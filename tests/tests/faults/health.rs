//! Something else has the health endpoint's address.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result};
use wharf_api::HealthReport;
use wharf_tests::{Node, NodeConfig, process::ip, scenario, space::Space};

use crate::{
    phrases::WRONG_ANSWER,
    support::{all_is_well, await_screen, await_status, remedy, wharf},
};

const ON: &str = "--health-interval-ms=200";
const OFF: &str = "--health-interval-ms=0";

/// Answers as another node's health endpoint would.
struct Stranger {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stranger {
    fn start(space: &Space) -> Result<Self> {
        let listener = space.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 4_240)))?.context("listen")?;
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            while !told.load(Ordering::Acquire) {
                match listener.accept() {
                    Ok((stream, _)) => drop(answer(stream)), // a probe that went away asks again
                    Err(_) => thread::sleep(Duration::from_millis(2)),
                }
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.join().ok(); // its panic was printed
        }
    }
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let _ = stream.read(&mut [0; 512])?;
    let body = "{\"node\":\"pier\",\"nonce\":\"00\"}";
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

fn address(node: &Node) -> Result<Ipv4Addr> {
    let shown = node.wharf(&["health", "status", "-o", "json"])?;
    let report: HealthReport = serde_json::from_str(&shown.stdout).with_context(|| shown.describe())?;
    report.nodes.first().and_then(|n| n.ipv4).with_context(|| format!("no IPv4 address in {report:?}"))
}

#[test]
fn something_else_answers_at_the_health_endpoints_address() -> Result<()> {
    let flags = ["--node-name", "quay", "--prepared-programs", "4", "--audit-interval-ms", "5000", ON];
    let config = NodeConfig { flags: flags.map(str::to_owned).to_vec(), toml: None };
    scenario(config, |node| {
        await_screen(node, &["health", "status"], |s| s.says("quay ok"))?;
        let address = address(node)?;
        let stranger = Stranger::start(node.space())?;
        ip(node.space(), "link set lo up")?;
        ip(node.space(), &format!("addr add {address}/32 dev lo"))?;
        await_status(node, 1, WRONG_ANSWER.status)?;
        await_screen(node, &["health", "status"], |s| s.says_all(WRONG_ANSWER.other))?
            .must(1, &[&format!("HTTP to {address}"), "wrong answer"])?;
        wharf(node, &["explain", &address.to_string()])?.must(1, WRONG_ANSWER.explain)?;
        remedy(node, WRONG_ANSWER.remedy, &[("ADDRESS", &address.to_string()), ("LINK", "lo")])?;
        drop(stranger);
        await_screen(node, &["health", "status"], |s| s.says("quay ok"))?.must_exit(0)?;
        all_is_well(node)?;
        // The end of a scenario wants to see a node without an endpoint.
        node.stop_agent()?;
        node.set_flag(ON, false);
        node.set_flag(OFF, true);
        node.start_agent()
    })
}
