//! Notifications of address changes on the node.

use std::io;

use rtnetlink::sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use tokio::io::{Interest, unix::AsyncFd};
use wharf_core::kernel::Result;

use crate::error::wrap;

const OPERATION: &str = "follow addresses of the node";

/// Multicast groups (`linux/rtnetlink.h`): IPv4, IPv6.
const GROUPS: [u32; 2] = [5, 9];

/// A subscription in one network namespace.
pub struct AddressChanges {
    socket: AsyncFd<Socket>,
}

impl AddressChanges {
    pub(crate) fn subscribe() -> Result<Self> {
        Self::try_subscribe().map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &e))
    }

    fn try_subscribe() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        for group in GROUPS {
            socket.add_membership(group)?;
        }
        // SAFETY: the descriptor is owned, never replaced, and not handed out by value.
        let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::READABLE) }.map_err(io::Error::from)?;
        Ok(Self { socket })
    }

    /// Waits for a change since the last call. Several changes, or a lost notification, count as one. Cancel safe.
    ///
    /// # Errors
    /// A failed socket.
    pub async fn next(&mut self) -> Result<()> {
        loop {
            let mut guard = self.socket.readable().await.map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &e))?;
            let changed = discard(guard.get_inner()).map_err(|e| wrap(OPERATION, "NETLINK_ROUTE", &e))?;
            guard.clear_ready();
            if changed {
                return Ok(());
            }
        }
    }
}

/// True if a notification was received or lost.
fn discard(socket: &Socket) -> io::Result<bool> {
    let mut changed = false;
    loop {
        let mut content = [0; 16];
        match socket.recv(&mut &mut content[..], libc::MSG_DONTWAIT) {
            Ok(_) => changed = true,
            Err(e) if e.raw_os_error() == Some(libc::ENOBUFS) => changed = true,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(changed),
            Err(e) => return Err(e),
        }
    }
}
