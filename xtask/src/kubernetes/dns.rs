//! `kubernetes-dns`: the cluster's DNS server, in the control plane's network namespace.

mod message;
mod zone;

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{IpAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    process::Command,
    sync::{Arc, PoisonError, RwLock},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use self::{
    message::{Transport, answer},
    zone::{DOMAIN, Zone},
};
use super::{
    api::Api,
    network,
    place::{Place, said, until},
};
use crate::{args::DnsArgs, workspace::find_program};

const NAME: &str = "cluster-dns";
/// Pause between two reads of the services.
const PERIOD: Duration = Duration::from_millis(500);
/// Of a TCP connection.
const SILENCE: Duration = Duration::from_secs(10);
const LIMIT: Duration = Duration::from_secs(60);

const READ: [&str; 5] =
    ["get", "services,endpointslices.discovery.k8s.io", "--all-namespaces", "--output=json", "--request-timeout=5s"];

/// Starts the server and makes the Service `kube-dns`; waits for an answer.
pub(crate) fn start(place: &Place, api: &Api, logs: &Path) -> Result<()> {
    let program = std::env::current_exe().context("find this program")?;
    let busybox = find_program("busybox").context("start the DNS server: the machine has no busybox-static")?;
    let mut arguments = vec!["kubernetes-dns".to_owned()];
    arguments.extend(network::CONTROL_ADDRESSES.map(|address| format!("--address={address}")));
    arguments.push("--".to_owned());
    arguments.extend(api.words(&READ));
    place.start(NAME, &logs.join(format!("{NAME}.log")), &program, &arguments)?;
    // The API server makes the namespace kube-system soon after it is ready.
    until("the service kube-dns", LIMIT, || api.apply(&objects()).map(Some))?;
    let name = format!("kube-dns.kube-system.svc.{DOMAIN}");
    until("an answer of the DNS server", LIMIT, || {
        place.output(&busybox, &["nslookup", "-type=a", &name, network::CONTROL]).map(Some)
    })?;
    Ok(())
}

/// The server is no pod, so the Service has no selector.
fn objects() -> Vec<Value> {
    let ports = [("dns", "UDP"), ("dns-tcp", "TCP")];
    let ports = ports.map(|(name, protocol)| json!({"name": name, "protocol": protocol, "port": 53}));
    let mut objects = vec![json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"namespace": "kube-system", "name": "kube-dns", "labels": {"k8s-app": "kube-dns"}},
        "spec": {
            "ipFamilyPolicy": "RequireDualStack", "ipFamilies": ["IPv4", "IPv6"],
            "clusterIP": network::DNS[0], "clusterIPs": network::DNS, "ports": ports,
        },
    })];
    for (family, address) in ["IPv4", "IPv6"].into_iter().zip(network::CONTROL_ADDRESSES) {
        objects.push(json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": family,
            "metadata": {
                "namespace": "kube-system", "name": format!("kube-dns-{}", family.to_lowercase()),
                "labels": {
                    "kubernetes.io/service-name": "kube-dns",
                    "endpointslice.kubernetes.io/managed-by": "xtask.wharf.dev",
                },
            },
            "ports": ports, "endpoints": [{"addresses": [address], "conditions": {"ready": true}}],
        }));
    }
    objects
}

/// `None` until services are read.
#[derive(Debug, Clone, Default)]
struct Shared(Arc<RwLock<Option<Arc<Zone>>>>);

impl Shared {
    fn get(&self) -> Option<Arc<Zone>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, zone: Zone) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(zone));
    }
}

/// Runs until it is killed. Keeps the last records while services cannot be read.
pub(crate) fn run(arguments: &DnsArgs) -> Result<()> {
    let shared = Shared::default();
    for address in &arguments.addresses {
        serve(*address, arguments.port, &shared)?;
    }
    let (program, words) = arguments.command.split_first().context("read services: no command")?;
    let mut last = String::new();
    loop {
        let text = said(Command::new(program).args(words));
        let list = text.and_then(|text| serde_json::from_str(&text).context("read the list of services"));
        let now = match list.map(|list| Zone::of(&list)) {
            Ok(zone) => {
                let size = zone.size();
                shared.set(zone);
                format!("{size} names")
            }
            Err(error) => format!("{error:#}"),
        };
        if now != last {
            println!("{now}");
            last = now;
        }
        thread::sleep(PERIOD);
    }
}

fn serve(address: IpAddr, port: u16, shared: &Shared) -> Result<()> {
    let udp = UdpSocket::bind((address, port)).with_context(|| format!("bind {address}, UDP port {port}"))?;
    let tcp = TcpListener::bind((address, port)).with_context(|| format!("bind {address}, TCP port {port}"))?;
    let zone = shared.clone();
    thread::spawn(move || serve_udp(&udp, &zone));
    let zone = shared.clone();
    thread::spawn(move || serve_tcp(&tcp, &zone));
    Ok(())
}

fn serve_udp(socket: &UdpSocket, shared: &Shared) {
    let mut buffer = [0; 4096];
    loop {
        match socket.recv_from(&mut buffer) {
            Ok((length, from)) => {
                let zone = shared.get();
                let query = buffer.get(..length).unwrap_or_default();
                if let Some(reply) = answer(query, zone.as_deref(), Transport::Udp) {
                    // The client may be gone.
                    drop(socket.send_to(&reply, from));
                }
            }
            // An earlier client was gone.
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            Err(error) => {
                eprintln!("receive by UDP: {error}");
                thread::sleep(PERIOD);
            }
        }
    }
}

fn serve_tcp(listener: &TcpListener, shared: &Shared) {
    loop {
        let shared = shared.clone();
        let started = listener.accept().and_then(|(stream, _)| {
            let serve = move || drop(serve_connection(stream, &shared));
            thread::Builder::new().spawn(serve)
        });
        if let Err(error) = started {
            eprintln!("accept a TCP connection: {error}");
            thread::sleep(PERIOD);
        }
    }
}

/// Ends with the connection, or with a message that is no query.
fn serve_connection(mut stream: TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    loop {
        let mut length = [0; 2];
        stream.read_exact(&mut length)?;
        let mut query = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut query)?;
        let zone = shared.get();
        let Some(reply) = answer(&query, zone.as_deref(), Transport::Tcp) else { return Ok(()) };
        let length = u16::try_from(reply.len()).unwrap_or(u16::MAX);
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend(reply);
        stream.write_all(&bytes)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_has_the_server_as_its_endpoints() {
        let zone = Zone::of(&json!({"items": objects()}));
        let records = zone.records(&zone::tests::name("kube-dns.kube-system.svc.cluster.local")).len();
        assert_eq!((records, objects().len()), (2, 3));
        assert_eq!(network::DNS.len(), network::SERVICES.len());
    }

    #[test]
    fn udp_and_tcp_answer() -> Result<()> {
        let shared = Shared::default();
        let localhost = IpAddr::from([127, 0, 0, 1]);
        let udp = UdpSocket::bind((localhost, 0))?;
        let tcp = TcpListener::bind((localhost, 0))?;
        let (to_udp, to_tcp) = (udp.local_addr()?, tcp.local_addr()?);
        let (first, second) = (shared.clone(), shared.clone());
        thread::spawn(move || serve_udp(&udp, &first));
        thread::spawn(move || serve_tcp(&tcp, &second));
        shared.set(zone::tests::zone());
        let query = message::tests::query("cluster.shop.svc.cluster.local", 1);

        let client = UdpSocket::bind((localhost, 0))?;
        client.set_read_timeout(Some(SILENCE))?;
        client.send_to(b"short", to_udp)?;
        client.send_to(&query, to_udp)?;
        let mut by_udp = [0; 512];
        let length = client.recv(&mut by_udp)?;
        let by_udp = &by_udp[..length];

        let mut stream = TcpStream::connect(to_tcp)?;
        stream.set_read_timeout(Some(SILENCE))?;
        for _ in 0..2 {
            stream.write_all(&u16::try_from(query.len())?.to_be_bytes())?;
            stream.write_all(&query)?;
            let mut by_tcp = vec![0; length + 2];
            stream.read_exact(&mut by_tcp)?;
            assert_eq!(&by_tcp[2..], by_udp);
        }
        assert!(by_udp.ends_with(&[10, 96, 0, 7]));
        stream.write_all(&[0, 1, 0])?;
        assert_eq!(stream.read(&mut [0])?, 0);
        Ok(())
    }
}
