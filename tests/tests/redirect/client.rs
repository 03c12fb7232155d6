//! The client's end of a UDP flow.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use wharf_tests::space::Space;

/// How long an echo is waited for that must come, and one that must not.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
pub(crate) const LOST: Duration = Duration::from_millis(600);

/// The client's end of a flow.
pub(crate) struct Flow {
    pub(crate) socket: UdpSocket,
    to: SocketAddr,
}

impl Flow {
    pub(crate) fn new(from: &Space, to: SocketAddr) -> Result<Self> {
        Self::of_port(from, 0, to)
    }

    pub(crate) fn of_port(from: &Space, port: u16, to: SocketAddr) -> Result<Self> {
        let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
        let socket = from.run(|| UdpSocket::bind((any, port)))?.with_context(|| format!("bind port {port}"))?;
        // Only what comes from the server's address and port is an answer.
        socket.connect(to)?;
        Ok(Self { socket, to })
    }

    pub(crate) fn port(&self) -> Result<u16> {
        Ok(self.socket.local_addr()?.port())
    }

    /// Whether a datagram comes back in this time.
    pub(crate) fn is_echoed(&self, payload: &[u8], patience: Duration) -> Result<bool> {
        match self.socket.send(payload) {
            // An error about a datagram before.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => self.socket.send(payload).map(drop)?,
            sent => drop(sent?),
        }
        self.gets(payload, patience)
    }

    /// Whether these bytes come in this time; others are not waited for any more.
    pub(crate) fn gets(&self, payload: &[u8], patience: Duration) -> Result<bool> {
        let (end, mut buffer) = (Instant::now() + patience, vec![0; 65_536]);
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            self.socket.set_read_timeout(Some(left))?;
            match self.socket.recv(&mut buffer) {
                Ok(n) if buffer.get(..n) == Some(payload) => return Ok(true),
                Ok(_) => {}
                Err(e)
                    if matches!(
                        e.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::ConnectionRefused
                    ) => {}
                Err(e) => bail!("{}: {e}", self.to),
            }
        }
        Ok(false)
    }

    pub(crate) fn passes(&self, what: &str) -> Result<()> {
        ensure!(self.is_echoed(what.as_bytes(), PATIENCE)?, "{}: {what}", self.to);
        Ok(())
    }

    pub(crate) fn is_lost(&self, what: &str) -> Result<()> {
        ensure!(!self.is_echoed(what.as_bytes(), LOST)?, "{}: {what}", self.to);
        Ok(())
    }
}
