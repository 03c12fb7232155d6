//! Probes through the datapath: ICMP echo, TCP connect and HTTP.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, OwnedFd},
    time::{Duration, Instant},
};

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, socket};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UdpSocket},
    time::timeout,
};
use wharf_api::{ProbeKind, ProbeOutcome};

use super::server::{Hello, PORT};

/// Far longer than an answer takes.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);
/// Bytes; the responder may be foreign.
const MAX_ANSWER: u64 = 4_096;
/// Bytes; identifies an echo reply.
const TOKEN: usize = 16;

/// Probe result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// With round-trip time.
    Answered(Duration),
    /// With cause.
    NoAnswer(String),
    /// From another responder, described.
    WrongAnswer(String),
    /// Not sent, with cause.
    NotTried(String),
}

impl Outcome {
    pub(super) fn words(&self) -> (ProbeOutcome, String) {
        match self {
            Self::Answered(_) => (ProbeOutcome::Answered, String::new()),
            Self::NoAnswer(why) => (ProbeOutcome::NoAnswer, why.clone()),
            Self::WrongAnswer(what) => (ProbeOutcome::WrongAnswer, what.clone()),
            Self::NotTried(why) => (ProbeOutcome::NotTried, why.clone()),
        }
    }
}

/// A probe and its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probed {
    /// Probed address.
    pub address: IpAddr,
    pub kind: ProbeKind,
    /// Result.
    pub outcome: Outcome,
}

impl Probed {
    pub(super) fn failure(&self) -> Option<String> {
        let (Outcome::NoAnswer(why) | Outcome::WrongAnswer(why)) = &self.outcome else { return None };
        Some(format!("{} to {}: {why}", self.kind.as_str(), self.address))
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Expected<'a> {
    /// The process with this nonce.
    Nonce(&'a str),
    /// Any process of this node; the nonce is unknown.
    Name(&'a str),
}

/// Within two deadlines.
pub(super) async fn round(addresses: &[IpAddr], expected: Expected<'_>) -> Vec<Probed> {
    let one = |address: IpAddr| async move {
        let (icmp, (tcp, http)) = tokio::join!(echo(address), hello(address, expected));
        [(ProbeKind::Icmp, icmp), (ProbeKind::Tcp, tcp), (ProbeKind::Http, http)].map(|(kind, outcome)| Probed {
            address,
            kind,
            outcome,
        })
    };
    futures::future::join_all(addresses.iter().copied().map(one)).await.into_iter().flatten().collect()
}

/// ICMP only, within one deadline.
pub(super) async fn echoes(addresses: &[IpAddr]) -> Vec<Probed> {
    let one = |address: IpAddr| async move { Probed { address, kind: ProbeKind::Icmp, outcome: echo(address).await } };
    futures::future::join_all(addresses.iter().copied().map(one)).await
}

async fn in_time(work: impl Future<Output = Outcome>) -> Outcome {
    timeout(DEADLINE, work).await.unwrap_or_else(|_| Outcome::NoAnswer(format!("no answer within {DEADLINE:?}")))
}

async fn echo(address: IpAddr) -> Outcome {
    let (socket, raw) = match icmp_socket(address, None) {
        Ok(socket) => socket,
        Err(error) => {
            let hint = match error.kind() {
                io::ErrorKind::PermissionDenied => "; the agent needs CAP_NET_RAW for it",
                _ => "",
            };
            return Outcome::NotTried(format!("make an ICMP socket: {error}{hint}"));
        }
    };
    in_time(async {
        let token: [u8; TOKEN] = rand::random();
        let sent = Instant::now();
        match exchange(&socket, raw, address, &token).await {
            Ok(()) => Outcome::Answered(sent.elapsed()),
            Err(error) => Outcome::NoAnswer(error.to_string()),
        }
    })
    .await
}

/// For a node in a network of this node's links.
const NEAR: Duration = Duration::from_millis(500);

/// Whether a near address answers an ICMP echo. `from`: source. `None`: not sent.
pub(super) async fn answers(from: Option<IpAddr>, to: IpAddr) -> Option<bool> {
    let (socket, raw) = icmp_socket(to, from).ok()?;
    let token: [u8; TOKEN] = rand::random();
    send(&socket, to, &token).await.ok()?;
    Some(matches!(timeout(NEAR, receive(&socket, raw, to, &token)).await, Ok(Ok(()))))
}

/// Raw (true), or a ping socket if not allowed. `from`: source.
fn icmp_socket(address: IpAddr, from: Option<IpAddr>) -> io::Result<(UdpSocket, bool)> {
    let (family, protocol) = match address {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let open = |kind| socket(family, kind, flags, protocol);
    let (fd, raw): (OwnedFd, bool) = match open(SockType::Raw) {
        Ok(fd) => (fd, true),
        Err(refused) => (open(SockType::Datagram).map_err(|_| refused)?, false),
    };
    if let Some(from) = from {
        bind(fd.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(from, 0)))?;
    }
    // Tokio has no raw socket; UDP makes the same system calls.
    Ok((UdpSocket::from_std(std::net::UdpSocket::from(fd))?, raw))
}

async fn exchange(socket: &UdpSocket, raw: bool, address: IpAddr, token: &[u8; TOKEN]) -> io::Result<()> {
    send(socket, address, token).await?;
    receive(socket, raw, address, token).await
}

async fn send(socket: &UdpSocket, address: IpAddr, token: &[u8; TOKEN]) -> io::Result<()> {
    socket.connect(SocketAddr::new(address, 0)).await?;
    socket.send(&echo_request(address, token)).await.map(drop)
}

async fn receive(socket: &UdpSocket, raw: bool, address: IpAddr, token: &[u8; TOKEN]) -> io::Result<()> {
    let mut buffer = [0; 512];
    loop {
        let n = socket.recv(&mut buffer).await?;
        if is_answer(buffer.get(..n).unwrap_or_default(), raw, address, token) {
            return Ok(());
        }
    }
}

/// RFC 792, RFC 4443. The kernel fills in ICMPv6's checksum with its pseudo-header.
fn echo_request(address: IpAddr, token: &[u8; TOKEN]) -> Vec<u8> {
    let mut packet = vec![if address.is_ipv6() { 128 } else { 8 }, 0, 0, 0];
    // Ping sockets replace the identifier.
    packet.extend([token[0], token[1], 0, 1]);
    packet.extend(token);
    if address.is_ipv4() {
        let [a, b] = checksum(&packet).to_be_bytes();
        (packet[2], packet[3]) = (a, b);
    }
    packet
}

/// RFC 1071, for an even length.
fn checksum(packet: &[u8]) -> u16 {
    let words = packet.chunks_exact(2).map(|w| w.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap_or(u16::MAX)
}

/// A raw IPv4 socket receives the IP header too.
fn is_answer(packet: &[u8], raw: bool, address: IpAddr, token: &[u8; TOKEN]) -> bool {
    let header = match (raw && address.is_ipv4(), packet.first()) {
        (true, Some(first)) => usize::from(first & 0x0f) * 4,
        (true, None) => return false,
        (false, _) => 0,
    };
    let Some(icmp) = packet.get(header..) else { return false };
    let reply = if address.is_ipv6() { 129 } else { 0 };
    icmp.first() == Some(&reply) && icmp.get(8..8 + TOKEN) == Some(token)
}

async fn hello(address: IpAddr, expected: Expected<'_>) -> (Outcome, Outcome) {
    let began = Instant::now();
    let mut stream = match timeout(DEADLINE, TcpStream::connect((address, PORT))).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused && matches!(expected, Expected::Name(_)) => {
            let why = format!("refused: no health endpoint listens there, or a firewall rejects TCP port {PORT}");
            return unconnected(Outcome::NoAnswer(why));
        }
        // The process always listens, so another responder refused.
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let why = "something else answers (it refuses the connection; does the node itself have the address?)";
            return unconnected(Outcome::WrongAnswer(why.to_owned()));
        }
        Ok(Err(error)) => return unconnected(Outcome::NoAnswer(error.to_string())),
        Err(_) => return unconnected(Outcome::NoAnswer(format!("no answer within {DEADLINE:?}"))),
    };
    let connected = began.elapsed();
    let http = in_time(async {
        let asked = Instant::now();
        match ask(&mut stream).await {
            Ok(answer) => judge(&answer, expected, asked.elapsed()),
            Err(error) => Outcome::NoAnswer(error.to_string()),
        }
    })
    .await;
    (Outcome::Answered(connected), http)
}

fn unconnected(outcome: Outcome) -> (Outcome, Outcome) {
    (outcome, Outcome::NotTried("there is no TCP connection".into()))
}

async fn ask(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    stream.write_all(b"GET /hello HTTP/1.1\r\nHost: wharf-health\r\nConnection: close\r\n\r\n").await?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).await?;
    Ok(answer)
}

fn judge(answer: &[u8], expected: Expected<'_>, took: Duration) -> Outcome {
    if answer.is_empty() {
        return Outcome::NoAnswer("the connection was closed without an answer".into());
    }
    let foreign = |what: &str| Outcome::WrongAnswer(format!("something else answers ({what})"));
    let text = String::from_utf8_lossy(answer);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return foreign("not in HTTP") };
    if !head.starts_with("HTTP/1.1 200 ") {
        return foreign("not as the health endpoint does");
    }
    let Ok(hello) = serde_json::from_str::<Hello>(body) else { return foreign("not as the health endpoint does") };
    let (is_right, difference) = match expected {
        Expected::Nonce(nonce) => (hello.nonce == nonce, ", with another nonce"),
        Expected::Name(name) => (hello.node == name, ""),
    };
    if is_right {
        return Outcome::Answered(took);
    }
    let node: String = hello.node.chars().filter(|c| !c.is_control()).take(64).collect();
    foreign(&format!("a health endpoint that says it is of node {node:?}{difference}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const V4: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const V6: IpAddr = IpAddr::V6(std::net::Ipv6Addr::LOCALHOST);

    #[test]
    fn an_echo_request_sums_to_nothing() {
        let packet = echo_request(V4, &[7; TOKEN]);
        assert_eq!(checksum(&packet), 0);
        assert_eq!((packet[0], packet.len()), (8, 8 + TOKEN));
        assert_eq!(echo_request(V6, &[7; TOKEN])[..4], [128, 0, 0, 0]);
    }

    #[test]
    fn only_the_reply_with_the_token_is_the_answer() {
        let token = [7; TOKEN];
        let mut reply = echo_request(V4, &token);
        reply[0] = 0;
        let mut with_header = vec![0x46; 1];
        with_header.resize(24, 0);
        with_header.extend(&reply);
        assert!(is_answer(&reply, false, V4, &token) && is_answer(&with_header, true, V4, &token));
        assert!(!is_answer(&reply, false, V4, &[8; TOKEN]), "another's");
        assert!(!is_answer(&echo_request(V4, &token), false, V4, &token), "the request itself");
        for hostile in [&[][..], &[0x4f], &[0; 9], &with_header[..30]] {
            assert!(!is_answer(hostile, true, V4, &token) && !is_answer(hostile, false, V6, &token), "{hostile:?}");
        }
    }

    #[test]
    fn answers_are_told_apart() {
        let of = |answer: &str| judge(answer.as_bytes(), Expected::Nonce("n1"), Duration::from_millis(1));
        let ok = "HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{\"node\":\"quay\",\"nonce\":\"n1\"}";
        assert_eq!(of(ok), Outcome::Answered(Duration::from_millis(1)));
        assert!(matches!(of(""), Outcome::NoAnswer(_)));
        for (answer, word) in [
            (ok.replace("n1", "n2"), "of node \"quay\""),
            (ok.replace("200 OK", "404 Not Found"), "not as the health endpoint does"),
            ("HTTP/1.1 200 OK\r\n\r\n<html>".to_owned(), "not as the health endpoint does"),
            ("SSH-2.0-OpenSSH_9.9\r\n".to_owned(), "not in HTTP"),
        ] {
            let outcome = of(&answer);
            assert!(matches!(&outcome, Outcome::WrongAnswer(why) if why.contains(word)), "{answer:?}: {outcome:?}");
        }
        let of = |name: &str| judge(ok.as_bytes(), Expected::Name(name), Duration::from_millis(1));
        assert_eq!(of("quay"), Outcome::Answered(Duration::from_millis(1)));
        let why = "something else answers (a health endpoint that says it is of node \"quay\")";
        assert_eq!(of("pier"), Outcome::WrongAnswer(why.to_owned()));
    }

    #[tokio::test]
    async fn a_refused_connection_is_another_responder_only_where_the_process_is_known_to_listen() {
        let here = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
        let (tcp, http) = hello(here, Expected::Name("b")).await;
        assert!(matches!(&tcp, Outcome::NoAnswer(why) if why.starts_with("refused: ")), "{tcp:?}");
        assert!(matches!(http, Outcome::NotTried(_)), "{http:?}");
        let (tcp, _) = hello(here, Expected::Nonce("n")).await;
        assert!(matches!(tcp, Outcome::WrongAnswer(_)), "{tcp:?}");
    }

    #[test]
    fn a_hostile_node_name_stays_short_and_plain() {
        let body = serde_json::to_string(&Hello { node: "\u{1b}[2J".repeat(100), nonce: "x".into() }).expect("JSON");
        let answer = format!("HTTP/1.1 200 OK\r\n\r\n{body}");
        for expected in [Expected::Nonce("n"), Expected::Name("n")] {
            let Outcome::WrongAnswer(why) = judge(answer.as_bytes(), expected, DEADLINE) else {
                panic!("taken for ours");
            };
            assert!(why.len() < 200 && !why.contains('\u{1b}'), "{why}");
        }
    }
}
