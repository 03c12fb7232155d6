//! The harness itself, on two namespaces joined by a plain veth pair: what it reports as lost is lost, what it reports
//! as whole is whole. Without this a scenario that sees nothing would look like one that goes well.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use wharf_tests::{
    Sandbox, echo,
    icmp::{Ping, ping},
    process::{self, command_in, ip, run},
    scratch,
    stream::{TcpFlow, UdpStream},
    wait,
};

const RIGHT: [u8; 4] = [192, 0, 2, 2];

fn joined() -> Result<(Sandbox, Sandbox)> {
    let dir = scratch::fresh_dir("harness")?;
    let (left, right) = (Sandbox::create(&dir, "left")?, Sandbox::create(&dir, "right")?);
    let (l, r) = (left.space()?, right.space()?);
    ip(l, &format!("link add l0 type veth peer name r0 netns {}", right.path().display()))?;
    for (space, link, v4, v6) in
        [(l, "l0", "192.0.2.1/24", "2001:db8::1/64"), (r, "r0", "192.0.2.2/24", "2001:db8::2/64")]
    {
        ip(space, &format!("addr add {v4} dev {link}"))?;
        ip(space, &format!("addr add {v6} dev {link} nodad"))?;
        ip(space, &format!("link set {link} up"))?;
    }
    Ok((left, right))
}

#[test]
fn what_is_whole_is_reported_whole() -> Result<()> {
    let (left, right) = joined()?;
    let (l, r) = (left.space()?, right.space()?);
    let server = echo::EchoServer::start(r)?;
    for to in [IpAddr::from(RIGHT), "2001:db8::2".parse()?] {
        ping(l, to)?.must_answer()?;
        Ping { to, count: 2, payload: 4000 }.run(l)?.must_answer()?;
        echo::tcp(l, server.tcp_at(to), 1 << 20)?;
        echo::udp(l, server.udp_at(to), 8000)?;
        let (udp, tcp) = (UdpStream::start(l, r, to, 1000)?, TcpFlow::start(l, r, to)?);
        udp.await_more(200)?;
        tcp.await_more(200)?;
        udp.stop()?.must_be_perfect()?;
        tcp.stop()?.must_be_whole()?;
    }
    ensure!(server.datagrams() == 2, "the server counted {}", server.datagrams());
    Ok(())
}

#[test]
fn what_is_lost_is_reported_lost() -> Result<()> {
    let (left, right) = joined()?;
    let (l, r) = (left.space()?, right.space()?);
    let stream = UdpStream::start(l, r, RIGHT.into(), 1000)?;
    stream.await_more(50)?;
    // Frames to a MAC address that is nobody's any more vanish at the receiver; the sender notices nothing.
    ip(r, "link set r0 arp off")?;
    ip(r, "link set r0 address 02:00:00:00:00:99")?;
    let before = stream.received();
    let lonely = Ping { to: RIGHT.into(), count: 1, payload: 56 }.run(l)?;
    ensure!(lonely.answered == 0 && lonely.must_answer().is_err(), "{lonely:?}");
    let report = stream.stop()?;
    ensure!(report.lost() > 0 && report.must_be_perfect().is_err(), "{report:?}");
    ensure!(report.received >= before, "{report:?}");
    Ok(())
}

#[test]
fn a_connection_that_breaks_is_reported_broken() -> Result<()> {
    let (left, right) = joined()?;
    let (l, r) = (left.space()?, right.space()?);
    let flow = TcpFlow::start(l, r, RIGHT.into())?;
    flow.await_more(10)?;
    let mut cut = command_in(l, "ss")?;
    cut.args(["-K", "dst", "192.0.2.2"]);
    run(cut, b"", wait::PATIENCE)?.ok()?;
    wait::until("the flow's end", || Ok(flow.is_over().then_some(())))?;
    let report = flow.stop()?;
    ensure!(report.must_be_whole().is_err(), "{report:?}");
    Ok(())
}

#[test]
fn nothing_of_a_sandbox_is_seen_outside_the_test() -> Result<()> {
    let (left, _right) = joined()?;
    let mine = left.space()?.links()?;
    ensure!(mine.contains(&"l0".to_owned()), "{mine:?}");
    let outside = std::fs::read_to_string("/proc/1/net/dev")?;
    ensure!(!outside.contains("l0:"), "{outside}");
    ensure!(!std::path::Path::new("/proc/1/root").join(left.path().strip_prefix("/")?).exists());
    Ok(())
}

/// They are the same libraries; only the crash tests' own programs arm the points.
#[test]
fn the_product_has_no_crash_points() -> Result<()> {
    for name in ["wharf-agent", "wharf-cni", "wharf"] {
        let has = |program: std::path::PathBuf| -> Result<bool> {
            let bytes = std::fs::read(&program).with_context(|| format!("read {}", program.display()))?;
            Ok(memmem(&bytes, b"WHARF_CRASH_FILE"))
        };
        ensure!(has(process::crash_bin(name)?)?, "{name}-crash has no crash points");
        ensure!(!has(process::bin(name)?)?, "{name} can be killed at a crash point");
    }
    Ok(())
}

fn memmem(bytes: &[u8], word: &[u8]) -> bool {
    bytes.windows(word.len()).any(|window| window == word)
}
