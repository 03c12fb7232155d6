//! Processes that hold a port of the node. Podman publishes ports that a socket of the container's monitor (conmon)
//! reserves: this holder is no conflict.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, BufRead as _, BufReader, Read as _},
    net::IpAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use wharf_core::{
    ids::ContainerId,
    nat::{PortMapping, Protocol},
};

/// Bytes. Conmon names its container at the beginning.
const MAX_COMMAND_LINE: u64 = 64 << 10;
/// TCP_LISTEN in `/proc/net/tcp`.
const LISTENS: &str = "0A";

#[derive(Debug, PartialEq)]
struct Socket {
    protocol: Protocol,
    ip: IpAddr,
    port: u16,
    inode: u64,
}

impl Socket {
    fn holds(&self, mapping: &PortMapping) -> bool {
        let ipv4 = mapping.container.is_ipv4();
        let same_ip = match self.ip.is_ipv4() == ipv4 {
            true => self.ip.is_unspecified() || mapping.host_ip.is_none_or(|ip| ip == self.ip),
            // `::` includes the IPv4 port, unless IPv6-only, which /proc does not show.
            false => ipv4 && self.ip.is_unspecified(),
        };
        same_ip && (self.protocol, self.port) == (mapping.protocol, mapping.host_port.get())
    }
}

/// Invisible holders (another PID namespace) are not the container's monitor.
pub(crate) fn first_of_others<'a>(container: &ContainerId, held: &'a [PortMapping]) -> Option<&'a PortMapping> {
    let first = held.first()?;
    let look = || -> io::Result<_> {
        let mut sockets = sockets()?;
        sockets.retain(|socket| held.iter().any(|mapping| socket.holds(mapping)));
        let of_monitor = held_by_monitor(container, &sockets.iter().map(|socket| socket.inode).collect())?;
        Ok(held.iter().find(|mapping| {
            let mut holding = sockets.iter().filter(|socket| socket.holds(mapping)).peekable();
            holding.peek().is_none() || !holding.all(|socket| of_monitor.contains(&socket.inode))
        }))
    };
    look().unwrap_or_else(|error| {
        tracing::debug!(%error, "the holders of published ports cannot be determined");
        Some(first)
    })
}

/// Only held by the container's monitor. Skips other network namespaces, whose processes may have many descriptors.
fn held_by_monitor(container: &ContainerId, inodes: &HashSet<u64>) -> io::Result<HashSet<u64>> {
    let netns = |path: PathBuf| fs::metadata(path).map(|netns| (netns.dev(), netns.ino()));
    let own = netns("/proc/thread-self/ns/net".into())?;
    let (mut of_monitor, mut of_others) = (HashSet::new(), HashSet::new());
    for process in fs::read_dir("/proc")? {
        let process = process?.path();
        if !netns(process.join("ns/net")).is_ok_and(|netns| netns == own) {
            continue;
        }
        let Ok(descriptors) = fs::read_dir(process.join("fd")) else { continue };
        let held: Vec<u64> = descriptors
            .filter_map(|descriptor| inode_of(&fs::read_link(descriptor.ok()?.path()).ok()?))
            .filter(|inode| inodes.contains(inode))
            .collect();
        // Reading a command line waits for the process's memory.
        if !held.is_empty() {
            if is_monitor(container, &process) { &mut of_monitor } else { &mut of_others }.extend(held);
        }
    }
    Ok(&of_monitor - &of_others)
}

fn inode_of(link: &Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// Whether the command line has `-c ID` or `--cid ID` (conmon(8)).
fn is_monitor(container: &ContainerId, process: &Path) -> bool {
    let mut line = Vec::new();
    let read = File::open(process.join("cmdline")).and_then(|file| file.take(MAX_COMMAND_LINE).read_to_end(&mut line));
    let arguments: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    read.is_ok()
        && arguments
            .windows(2)
            .any(|pair| matches!(pair, [b"-c" | b"--cid", id] if *id == container.as_str().as_bytes()))
}

fn sockets() -> io::Result<Vec<Socket>> {
    let mut sockets = Vec::new();
    for (protocol, table) in
        [(Protocol::Tcp, "tcp"), (Protocol::Tcp, "tcp6"), (Protocol::Udp, "udp"), (Protocol::Udp, "udp6")]
    {
        let lines = match File::open(format!("/proc/thread-self/net/{table}")) {
            Ok(file) => BufReader::new(file).lines(),
            // Without IPv6.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        for line in lines {
            sockets.extend(socket(protocol, &line?));
        }
    }
    Ok(sockets)
}

/// A line of `/proc/net/tcp` (proc_net_tcp.rst); `None` for heading and connections.
fn socket(protocol: Protocol, line: &str) -> Option<Socket> {
    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, local, _, state, .., _] = *fields.as_slice() else { return None };
    if protocol == Protocol::Tcp && state != LISTENS {
        return None;
    }
    let (ip, port) = local.split_once(':')?;
    let mut octets = [0; 16];
    for (word, at) in octets.chunks_exact_mut(4).zip((0..ip.len()).step_by(8)) {
        // Host byte order.
        word.copy_from_slice(&u32::from_str_radix(ip.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    }
    let ip = match (ip.len(), octets) {
        (8, [a, b, c, d, ..]) => IpAddr::from([a, b, c, d]),
        _ => IpAddr::from(octets).to_canonical(),
    };
    Some(Socket { protocol, ip, port: u16::from_str_radix(port, 16).ok()?, inode: fields.get(9)?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use std::{
        net::TcpListener,
        os::fd::OwnedFd,
        process::{Child, Command, Stdio},
    };

    use super::*;

    fn mapping(port: u16, host_ip: Option<&str>, container: &str) -> PortMapping {
        PortMapping {
            protocol: Protocol::Tcp,
            host_ip: host_ip.map(|ip| ip.parse().expect("address")),
            host_port: port.try_into().expect("port"),
            container: container.parse().expect("address"),
            container_port: 80.try_into().expect("port"),
        }
    }

    /// Like the monitor of container `64`.
    fn monitor(listener: &TcpListener) -> Child {
        let socket = OwnedFd::from(listener.try_clone().expect("a copy"));
        Command::new("head").args(["-c", "64"]).stdin(Stdio::piped()).stdout(socket).spawn().expect("started")
    }

    #[test]
    fn a_port_is_free_for_the_container_whose_monitor_alone_holds_it() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let port = listener.local_addr().expect("address").port();
        let held = [mapping(port, Some("127.0.0.1"), "10.77.0.2")];
        let other = |id: &str| first_of_others(&ContainerId::parse(id).expect("id"), &held).is_some();
        let mut monitor = monitor(&listener);
        assert!(other("64"), "this process holds it too");
        drop(listener);
        assert!(!other("64"));
        assert!(other("6"), "the monitor of another container");
        assert!(other("head"), "the program's name is no container");
        monitor.kill().expect("killed");
        monitor.wait().expect("ended");
        assert!(other("64"), "a holder that nobody sees");
    }

    #[test]
    fn lines_of_the_kernel_and_others() {
        let line = |local: &str, state: &str| {
            format!(
                "   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 4711 1 0000"
            )
        };
        let word = |octets: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(octets));
        let (v4, zero) = (word([10, 0, 0, 1]), "0".repeat(24));
        let mapped = format!("{}{}{v4}", "0".repeat(16), word([0, 0, 0xff, 0xff]));
        let [listens, connected] = ["0A", "01"].map(|state| line(&format!("{v4}:1F90"), state));
        let ip = |text: &str| socket(Protocol::Tcp, &line(&format!("{text}:1F90"), "0A")).map(|socket| socket.ip);
        let of_line = Socket { protocol: Protocol::Tcp, ip: [10, 0, 0, 1].into(), port: 8080, inode: 4711 };
        assert_eq!(socket(Protocol::Tcp, &listens), Some(of_line));
        assert_eq!(socket(Protocol::Tcp, &connected), None);
        assert!(socket(Protocol::Udp, &connected).is_some());
        assert_eq!(ip(&mapped), Some([10, 0, 0, 1].into()));
        assert_eq!(ip(&format!("{zero}{}", word([0, 0, 0, 1]))), Some("::1".parse().expect("address")));
        for bad in ["", "0", "0000000g", "0123456789", "é1234567", &"0".repeat(64)] {
            assert!(ip(bad).is_none_or(|ip| ip.is_unspecified()), "{bad:?}");
        }
        assert_eq!(socket(Protocol::Tcp, "  sl  local_address rem_address   st tx_queue"), None);
    }

    #[test]
    fn which_sockets_are_in_the_way_of_which_addresses() {
        let (v4, v6) = ("10.77.0.2", "fd00::2");
        for (ip, host_ip, container, holds) in [
            ("0.0.0.0", None, v4, true),
            ("127.0.0.1", None, v4, true),
            ("0.0.0.0", Some("127.0.0.1"), v4, true),
            ("127.0.0.2", Some("127.0.0.1"), v4, false),
            ("::", None, v4, true),
            ("::1", None, v4, false),
            ("::", None, v6, true),
            ("0.0.0.0", None, v6, false),
        ] {
            let socket = Socket { protocol: Protocol::Tcp, ip: ip.parse().expect("address"), port: 8080, inode: 1 };
            assert_eq!(socket.holds(&mapping(8080, host_ip, container)), holds, "{ip} {host_ip:?} {container}");
            assert!(!socket.holds(&mapping(8081, host_ip, container)));
        }
    }
}
