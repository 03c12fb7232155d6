//! smoke
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]
mod support;
use support::*;
use wharf_core::nat::*;
use wharf_datapath::nft::{self, Ensured};

fn nat() -> Nat {
    let m = |host_ip: Option<&str>, protocol, port: u16, container: &str| PortMapping {
        protocol,
        host_ip: host_ip.map(|ip| ip.parse().unwrap()),
        host_port: port.try_into().unwrap(),
        container: container.parse().unwrap(),
        container_port: 80.try_into().unwrap(),
    };
    Nat {
        masquerade: Some(Masquerade {
            pools: vec!["10.77.0.0/16".parse().unwrap(), "fd77::/64".parse().unwrap()],
            excluded: vec!["198.51.100.0/24".parse().unwrap()],
            source4: None,
            source6: Some("2001:db8::1".parse().unwrap()),
        }),
        mappings: vec![
            m(None, Protocol::Tcp, 8080, "10.77.0.2"),
            m(None, Protocol::Udp, 8080, "fd77::2"),
            m(Some("192.0.2.1"), Protocol::Sctp, 8080, "10.77.0.2"),
            m(Some("2001:db8::1"), Protocol::Tcp, 8080, "fd77::2"),
        ],
    }
}

#[test]
fn smoke() {
    in_namespaces(|_| {
        let r = nft::ensure(&nat());
        eprintln!("{r:?}");
        eprintln!("{}", run("nft", &["-nn", "list", "ruleset"]));
        let t = nft::look().unwrap().unwrap();
        eprintln!("{:#?}", t.differences(&nat()));
        eprintln!("{:#?}", t.mappings());
        assert_eq!(nft::ensure(&nat()).unwrap(), Ensured::Unchanged);
    });
}
