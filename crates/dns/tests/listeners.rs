//! Ports that come and go.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod world;

use std::{collections::BTreeMap, net::UdpSocket as StdUdpSocket, sync::Arc};

use wharf_dns::{DnsProxy, Error, Names, Outcome};
use world::{
    message::{A, query},
    resolver::{Resolver, read, write},
    *,
};

/// Whether somebody has the port of UDP and TCP at a loopback address.
fn taken(port: u16) -> bool {
    ["127.0.0.1", "::1"]
        .iter()
        .all(|ip| StdUdpSocket::bind((*ip, port)).is_err() && std::net::TcpStream::connect((*ip, port)).is_ok())
}

fn free(port: u16) -> bool {
    ["127.0.0.1", "::1"]
        .iter()
        .all(|ip| StdUdpSocket::bind((*ip, port)).is_ok() && std::net::TcpListener::bind((*ip, port)).is_ok())
}

#[test]
fn ports_are_bound_and_free_when_set_returns_and_one_that_stays_keeps_its_queries() {
    in_a_world(|mut world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.set([PORT, 15001]).await;
        assert!(taken(PORT) && taken(15001));
        assert_eq!(world.proxy.status().listeners, [15001, PORT]);
        let mut stream = world.tcp(CLIENT, SERVER).await;
        write(&mut stream, &query(1, "late.test", A)).await;
        resolver.until(1).await;

        // 15001 goes and comes again at once, 15002 comes.
        world.set([PORT]).await;
        assert!(free(15001));
        world.set([PORT, 15001, 15002]).await;
        assert!(taken(PORT) && taken(15001) && taken(15002));
        assert_eq!(read(&mut stream).await.expect("an answer")[..2], [0, 1]);
        assert!(matches!(world.outcome().await, Outcome::Answered { .. }));

        // Another rule for the same port.
        let mut other = listener();
        other.asks = Arc::new(|name| name == "example.com");
        assert!(world.proxy.set([(PORT, other)].into()).await[&PORT].is_ok());
        write(&mut stream, &query(2, "www.test", A)).await;
        assert_eq!(read(&mut stream).await.expect("an answer")[3], 5);
        assert_eq!(world.ask(CLIENT, SERVER, &query(2, "example.com", A)).await[3] & 0x0f, 0);
    });
}

#[test]
fn a_port_that_is_gone_takes_its_queries_and_connections_with_it() {
    in_a_world(|world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let mut stream = world.tcp(CLIENT, SERVER).await;
        write(&mut stream, &query(1, "silent.test", A)).await;
        let socket = world.udp(CLIENT, SERVER).await;
        socket.send(&query(1, "silent.test", A)).await.expect("sent");
        resolver.until(2).await;
        assert_eq!((world.proxy.status().pending, world.proxy.status().connections), (2, 1));
        assert!(world.proxy.set(BTreeMap::new()).await.is_empty());
        assert!(free(PORT));
        assert_eq!(tokio::time::timeout(LONG, read(&mut stream)).await.expect("closed"), None);
        assert_eq!((world.proxy.status().pending, world.proxy.status().connections), (0, 0));
    });
}

#[test]
fn a_port_that_somebody_has_fails_alone_and_is_tried_again() {
    in_a_world(|world| async move {
        let _resolver = Resolver::start(Some(&world.server), &[SERVER]);
        let taken = StdUdpSocket::bind(("::1", 15001)).expect("a socket");
        let wanted = || BTreeMap::from([0, PORT, 15001].map(|port| (port, listener())));
        let results = world.proxy.set(wanted()).await;
        assert!(results[&PORT].is_ok());
        assert!(matches!(results[&0], Err(Error::NoPort)));
        let Err(error) = &results[&15001] else { panic!("an error") };
        let text = "listen for DNS queries at [::1]:15001 (UDP): Address already in use (os error 98); \
                    end what has the port, or take another one";
        assert_eq!(error.to_string(), text);
        assert_eq!(world.proxy.status().failed[&15001], text);
        assert_eq!(world.proxy.status().listeners, [PORT]);
        let v4 = StdUdpSocket::bind(("127.0.0.1", 15001)).expect("nothing is left of it");
        assert_eq!(world.ask(CLIENT, SERVER, &query(7, "www.test", A)).await[3] & 0x0f, 0);

        drop((taken, v4));
        assert!(world.proxy.set(wanted()).await[&15001].is_ok());
        assert_eq!(world.proxy.status().failed.keys().collect::<Vec<_>>(), [&0]);
    });
}

#[test]
fn nothing_is_left_of_a_proxy_that_is_dropped() {
    in_a_world(|world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let mut stream = world.tcp(CLIENT, SERVER).await;
        write(&mut stream, &query(1, "silent.test", A)).await;
        resolver.until(1).await;
        let node = Arc::downgrade(&world.node);
        drop(world.proxy);
        let gone = async {
            assert_eq!(read(&mut stream).await, None);
            while !free(PORT) || node.strong_count() > 1 {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(LONG, gone).await.expect("the tasks end");
    });
}

#[test]
fn a_node_without_ipv6_serves_ipv4() {
    in_a_world(|world| async move {
        std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").expect("the namespace's own setting");
        let _resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        assert_eq!(world.ask(CLIENT, SERVER, &query(7, "www.test", A)).await[3] & 0x0f, 0);
    });
}

#[test]
fn records_that_nobody_takes_are_counted() {
    in_a_world(|world| async move {
        let (proxy, mut records) = DnsProxy::new(Arc::clone(&world.node) as Arc<dyn Names>, 2);
        assert!(proxy.set([(PORT, listener())].into()).await[&PORT].is_ok());
        for id in 0..5 {
            assert_eq!(world.ask(CLIENT, SERVER, &query(id, "example.com", A)).await[3], 5);
        }
        assert_eq!((proxy.status().totals["refused"], proxy.status().records_lost), (5, 3));
        assert!(records.recv().await.is_some());
    });
}
