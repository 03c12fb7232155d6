//! A flood of connections and datagrams, and a door that counts those that enter.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};
use wharf_tests::{space::Space, wait};

/// Of every door.
pub(crate) const PORT: u16 = 7_000;

/// Connections and datagrams that a namespace takes at [`PORT`], over both families, from when it has an address.
pub(crate) struct Door {
    stop: Arc<AtomicBool>,
    entered: Arc<AtomicU64>,
    watch: JoinHandle<()>,
}

impl Door {
    pub(crate) fn open(space: &Space) -> Result<Self> {
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, PORT));
        let (listener, receiver) = space.run(|| anyhow::Ok((TcpListener::bind(any)?, UdpSocket::bind(any)?)))??;
        listener.set_nonblocking(true)?;
        receiver.set_nonblocking(true)?;
        let (stop, entered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let watch = thread::spawn({
            let (stop, entered) = (Arc::clone(&stop), Arc::clone(&entered));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    while listener.accept().is_ok() || receiver.recv(&mut [0; 16]).is_ok() {
                        entered.fetch_add(1, Ordering::Relaxed);
                    }
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Ok(Self { stop, entered, watch })
    }

    pub(crate) fn entered(&self) -> u64 {
        self.entered.load(Ordering::Relaxed)
    }

    pub(crate) fn close(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.watch.join().map_err(|_| anyhow!("the watch panicked"))
    }
}

/// Connections and datagrams to the doors of addresses, without a pause, each from a port of its own.
pub(crate) struct Flood {
    stop: Arc<AtomicBool>,
    knocks: Arc<AtomicU64>,
    thread: JoinHandle<Result<()>>,
}

impl Flood {
    pub(crate) fn start(from: &Space, to: &[IpAddr]) -> Result<Self> {
        let (stop, knocks) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (from, to) = (from.try_clone()?, to.to_vec());
        let thread = thread::spawn({
            let (stop, knocks) = (Arc::clone(&stop), Arc::clone(&knocks));
            move || from.run(|| flood(&to, &stop, &knocks))?
        });
        Ok(Self { stop, knocks, thread })
    }

    pub(crate) fn knocks(&self) -> u64 {
        self.knocks.load(Ordering::Relaxed)
    }

    pub(crate) fn await_more(&self, count: u64) -> Result<()> {
        let goal = self.knocks() + count;
        wait::until("more of the flood", || Ok((self.knocks() >= goal).then_some(())))
    }

    pub(crate) fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let knocks = self.knocks();
        self.thread.join().map_err(|_| anyhow!("the flood panicked"))??;
        Ok(knocks)
    }
}

fn flood(to: &[IpAddr], stop: &AtomicBool, knocks: &AtomicU64) -> Result<()> {
    use std::os::fd::AsRawFd as _;
    while !stop.load(Ordering::Relaxed) {
        for address in to.iter().map(|address| SockaddrStorage::from(SocketAddr::new(*address, PORT))) {
            let family = if address.as_sockaddr_in().is_some() { AddressFamily::Inet } else { AddressFamily::Inet6 };
            for kind in [SockType::Stream, SockType::Datagram] {
                let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
                let socket = socket(family, kind, flags, None).context("make a socket")?;
                // Nobody is to answer: every outcome is right that is not a connection, which the door counts.
                let _ = connect(socket.as_raw_fd(), &address);
                if kind == SockType::Datagram {
                    let _ = nix::unistd::write(&socket, b"knock");
                } else {
                    // A connection that is answered within this time enters.
                    thread::sleep(Duration::from_micros(500));
                }
                knocks.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}
