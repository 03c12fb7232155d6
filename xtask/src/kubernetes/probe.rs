//! `kubernetes-probe`: reports when answers to datagrams stop and start, in a pod's network namespace.

use std::{
    io::{ErrorKind, Write},
    net::{SocketAddr, UdpSocket},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};

use crate::args::ProbeArgs;

const PERIOD: Duration = Duration::from_millis(1);
/// Answers have stopped after this time.
const SILENCE: Duration = Duration::from_millis(100);

/// Ends with its input, and thus with the starting program.
pub(crate) fn run(arguments: &ProbeArgs) -> Result<()> {
    thread::spawn(|| {
        drop(std::io::copy(&mut std::io::stdin(), &mut std::io::sink()));
        std::process::exit(0);
    });
    match arguments.to {
        Some(to) => ask(to),
        None => answer(arguments.port),
    }
}

fn answer(port: u16) -> Result<()> {
    let socket = UdpSocket::bind(("::", port)).context("bind")?;
    let mut buffer = [0; 64];
    loop {
        match socket.recv_from(&mut buffer) {
            // The peer may be gone.
            Ok((length, from)) => drop(socket.send_to(buffer.get(..length).unwrap_or_default(), from)),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error).context("receive"),
        }
    }
}

/// Prints `down TIME` for the first datagram without an answer, and `up TIME` for the next answer, in Unix nanoseconds.
fn ask(to: SocketAddr) -> Result<()> {
    let any: SocketAddr = if to.is_ipv6() { ([0_u16; 8], 0).into() } else { ([0; 4], 0).into() };
    let socket = UdpSocket::bind(any).context("bind")?;
    socket.connect(to).with_context(|| format!("connect to {to}"))?;
    socket.set_read_timeout(Some(Duration::from_millis(10))).context("set a time limit")?;
    let sender = socket.try_clone().context("share the socket")?;
    thread::spawn(move || {
        loop {
            // The text is the time of sending. Policy may refuse it.
            drop(sender.send(now().to_string().as_bytes()));
            thread::sleep(PERIOD);
        }
    });
    let mut is_up = false;
    let mut last = now();
    let mut buffer = [0; 64];
    let mut output = std::io::stdout();
    loop {
        let answer = socket.recv(&mut buffer).ok().and_then(|length| buffer.get(..length));
        let sent = answer.and_then(|bytes| std::str::from_utf8(bytes).ok()).and_then(|text| text.parse::<u128>().ok());
        if let Some(sent) = sent {
            last = last.max(sent);
            if !is_up {
                is_up = true;
                writeln!(output, "up {}", now())?;
            }
        } else if is_up && now().saturating_sub(last) > SILENCE.as_nanos() {
            is_up = false;
            writeln!(output, "down {}", last.saturating_add(PERIOD.as_nanos()))?;
        }
        output.flush()?;
    }
}

/// Unix time in nanoseconds.
pub(crate) fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|time| time.as_nanos()).unwrap_or_default()
}
