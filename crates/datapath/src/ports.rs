//! Checks before ports of the node are published.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::fd::AsRawFd as _,
};

use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket,
    sockopt::{IpFreebind, Ipv6V6Only, ReuseAddr},
};
use wharf_core::{
    ids::ContainerId,
    kernel::{KernelErrorKind, Result},
    nat::{PortMapping, Protocol},
};

use crate::{
    error::{fail, wrap},
    netlink::{Connection, address, route},
    port_holders,
};

const OPERATION: &str = "publish";

/// The node must have each host IP, and no process except the container's monitor may hold the port. `NotFound`: no
/// such address, `Exists`: held, `Unsupported`: `::1`.
pub(crate) fn observe(container: &ContainerId, mappings: &[PortMapping]) -> Result<()> {
    let asked = mappings.iter().any(|mapping| mapping.host_ip.is_some());
    let mut connection = asked.then(Connection::open).transpose()?;
    let own = connection.as_mut().map(address::list_all).transpose()?.unwrap_or_default();
    let mut taken = Vec::new();
    for mapping in mappings {
        let refused = |kind, cause: String| fail(OPERATION, mapping.to_string(), kind, cause);
        if let Some(ip) = mapping.host_ip {
            if ip == Ipv6Addr::LOCALHOST {
                let cause = "the kernel routes no packet from ::1 to a container; publish 127.0.0.1, or an IPv6 address of \
                             an interface";
                return Err(refused(KernelErrorKind::Unsupported, cause.to_owned()));
            }
            // The lookup adds addresses that only a route makes local, but omits interfaces that are down.
            let has = ip.is_ipv4() && ip.is_loopback()
                || own.iter().any(|(_, there)| *there == ip)
                || connection.as_mut().map_or(Ok(false), |connection| route::ends_here(connection, ip))?;
            if !has {
                let cause = format!(
                    "the node has no address {ip} (`ip addr`, `ip route get {ip}`); give one that it has, or none to publish on \
                     all of them"
                );
                return Err(refused(KernelErrorKind::NotFound, cause));
            }
        }
        if held(mapping).map_err(|e| wrap(OPERATION, mapping.to_string(), &e))? {
            taken.push(*mapping);
        }
    }
    let Some(mapping) = port_holders::first_of_others(container, &taken) else { return Ok(()) };
    let option = if mapping.protocol == Protocol::Tcp { "t" } else { "u" };
    let cause =
        format!("a process of the node holds this port (`ss -{option}lnp` names it); stop it, or choose another port");
    Err(fail(OPERATION, mapping.to_string(), KernelErrorKind::Exists, cause))
}

fn held(mapping: &PortMapping) -> io::Result<bool> {
    let (kind, reuses) = match mapping.protocol {
        // A port of closed connections is free.
        Protocol::Tcp => (SockType::Stream, true),
        Protocol::Udp => (SockType::Datagram, false),
        // A probe would load the module.
        Protocol::Sctp => return Ok(false),
    };
    let (family, every) = match mapping.container.is_ipv4() {
        true => (AddressFamily::Inet, Ipv4Addr::UNSPECIFIED.into()),
        false => (AddressFamily::Inet6, Ipv6Addr::UNSPECIFIED.into()),
    };
    let probe = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&probe, ReuseAddr, &reuses)?;
    // IPv6 does not bind addresses made local by a route.
    setsockopt(&probe, IpFreebind, &true)?;
    if family == AddressFamily::Inet6 {
        setsockopt(&probe, Ipv6V6Only, &true)?;
    }
    let address = SocketAddr::new(mapping.host_ip.unwrap_or(every), mapping.host_port.get());
    match bind(probe.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => Ok(false),
        Err(nix::Error::EADDRINUSE) => Ok(true),
        // Publishing does not need CAP_NET_BIND_SERVICE.
        Err(nix::Error::EACCES) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_below_1024_needs_no_right_of_its_own() {
        caps::drop(None, caps::CapSet::Effective, caps::Capability::CAP_NET_BIND_SERVICE).expect("dropped");
        let mapping = |container: &str| PortMapping {
            protocol: Protocol::Tcp,
            host_ip: None,
            host_port: 1.try_into().expect("port"),
            container: container.parse().expect("address"),
            container_port: 80.try_into().expect("port"),
        };
        observe(&ContainerId::parse("c").expect("id"), &[mapping("10.77.0.2")]).expect("not looked at");
    }
}
