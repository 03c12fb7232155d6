//! Something else answers at its address.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use wharf_api::{HealthState, NodeHealth, ProbeOutcome};
use wharf_tests::{Node, process::ip, scenario, space::Space};

use crate::support::{await_health, await_ok, config, end, well};

/// Answers as a health endpoint does, but with a nonce of its own.
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
                    Ok((mut stream, _)) => drop(answer(&mut stream)), // a probe that went away asks again
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

fn answer(stream: &mut std::net::TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut request = [0; 512];
    let _ = stream.read(&mut request)?;
    let body = "{\"node\":\"pier\",\"nonce\":\"00\"}";
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Gives the node itself the address: packets to it go there from then on. The stranger is there before, so that there
/// is no silence between.
fn take(node: &Node, address: IpAddr) -> Result<Stranger> {
    let stranger = Stranger::start(node.space())?;
    ip(node.space(), "link set lo up")?;
    ip(node.space(), &format!("addr add {address}/32 dev lo"))?;
    Ok(stranger)
}

fn is_wrong(h: &NodeHealth) -> bool {
    h.state == HealthState::WrongAnswer
}

#[test]
fn with_ours_in_its_place_it_is_told_and_not_relaunched() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        let address = IpAddr::V4(before.ipv4.context("IPv4")?);
        let stranger = take(node, address)?;
        // Twice as many rounds as silence is given.
        let wrong = await_health(node, "rounds of wrong answers", |h| is_wrong(h) && h.failed_rounds >= 6)?;
        ensure!((wrong.pid, wrong.launches) == (before.pid, before.launches), "relaunched: {wrong:?}");
        for word in [&format!("HTTP to {address}"), "something else answers", "\"pier\"", "not relaunched"] {
            ensure!(wrong.message.contains(word), "no {word:?} in {:?}", wrong.message);
        }
        let wrongs: Vec<bool> = wrong.probes.iter().map(|p| p.outcome == ProbeOutcome::WrongAnswer).collect();
        // ICMP, TCP and HTTP of IPv4, then of IPv6: only HTTP tells who answers.
        ensure!(wrongs == [false, false, true, false, false, false], "{:?}", wrong.probes);
        ip(node.space(), &format!("addr del {address}/32 dev lo"))?;
        drop(stranger);
        let after = await_ok(node)?;
        ensure!(after.pid == before.pid && after.last_relaunch.is_none(), "{after:?}");
        well(node)?;
        end(node, &after)
    })
}

#[test]
fn with_ours_gone_from_behind_it_is_relaunched() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        let address = IpAddr::V4(before.ipv4.context("IPv4")?);
        let stranger = take(node, address)?;
        ip(node.space(), &format!("route del {address}/32"))?;
        let anew = await_health(node, "a relaunch", |h| h.launches > before.launches && h.last_relaunch.is_some())?;
        let reason = &anew.last_relaunch.as_ref().context("a reason")?.reason;
        for word in ["something else answers", "in the kernel: route"] {
            ensure!(reason.contains(word), "no {word:?} in {reason:?}");
        }
        // The stranger is there still: that is told again, and now nothing more can be done.
        await_health(node, "the stranger to be told", is_wrong)?;
        ip(node.space(), &format!("addr del {address}/32 dev lo"))?;
        drop(stranger);
        let after = await_ok(node)?;
        ensure!((after.ipv4, after.ipv6) == (before.ipv4, before.ipv6), "{after:?}");
        well(node)?;
        end(node, &after)
    })
}

/// A container may connect to it as often as it likes, and hold what it has.
#[test]
fn a_container_that_holds_connections_does_not_silence_it() -> Result<()> {
    scenario(config(), |node| {
        let before = await_ok(node)?;
        let web = node.sandbox("web")?;
        let endpoint = node.attach(&web)?;
        let to = SocketAddr::new(IpAddr::V4(before.ipv4.context("IPv4")?), 4_240);
        let connect = || std::net::TcpStream::connect_timeout(&to, Duration::from_secs(5));
        let held: Vec<_> = web.space()?.run(|| (0..100).map(|_| connect()).collect())?;
        ensure!(held.iter().any(Result::is_ok), "no connection came about");
        let rounds = before.rounds + 5;
        let after = await_health(node, "more rounds", |h| h.rounds >= rounds && h.state == HealthState::Ok)?;
        ensure!((after.pid, after.launches) == (before.pid, before.launches), "{after:?}");
        drop(held);
        node.detach(&endpoint)?;
        end(node, &after)
    })
}
