//! Queries by UDP and TCP, over both families: what the client, the server and the node see of them.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod world;

use std::{net::IpAddr, time::Duration};

use wharf_dns::{Answer, Member, Outcome, Transport};
use world::{
    message::{A, AAAA, NXDOMAIN, TXT, query, with_edns},
    resolver::{Resolver, answer_to, read, write},
    *,
};

const MEMBER: Member = Member { id: 7, epoch: 107 };

fn learned(name: &str, address: &str, ttl: u64) -> Answer {
    let address: IpAddr = address.parse().expect("an address");
    Answer { member: MEMBER, name: name.into(), addresses: vec![(address, Duration::from_secs(ttl))] }
}

#[test]
fn an_allowed_name_is_asked_in_the_clients_name_and_answered_as_the_server_did() {
    in_a_world(|mut world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER, SERVER_6]);
        world.serve().await;
        for (from, to) in [(CLIENT, SERVER), (CLIENT_6, SERVER_6)] {
            let sent = query(0x1234, "wWw.Allowed.test", A);
            let socket = world.udp(from, to).await;
            socket.send(&sent).await.expect("sent");
            assert_eq!(Some(receive(&socket).await), answer_to(&sent, false), "byte for byte");
            assert_eq!(world.node.take(), [learned("www.allowed.test", "192.0.2.1", 60)]);

            let client = socket.local_addr().expect("an address");
            let [(peer, came)] = &resolver.take()[..] else { panic!("one query") };
            assert_eq!(peer.ip(), client.ip());
            assert_ne!(peer.port(), client.port());
            assert_eq!(came[2..], sent[2..], "the case, too");

            let record = world.record().await;
            assert_eq!(record.outcome, Outcome::Answered { rcode: 0, addresses: 1 });
            assert_eq!((record.listener, record.member, record.transport), (PORT, MEMBER, Transport::Udp));
            assert_eq!((record.client, record.server.ip().to_string(), record.server.port()), (client, to.into(), 53));
            assert_eq!(record.question.expect("a question").name, "www.allowed.test");
            assert!(record.took.is_some_and(|took| took < LONG));
        }
        assert_eq!(world.proxy.status().totals["answered"], 2);
        assert_eq!((world.proxy.status().pending, world.proxy.status().strangers), (0, 0));
    });
}

#[test]
fn a_connection_has_many_queries_whose_answers_come_as_they_are_ready() {
    in_a_world(|mut world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER, SERVER_6]);
        world.serve().await;
        for (from, to) in [(CLIENT, SERVER), (CLIENT_6, SERVER_6)] {
            let mut stream = world.tcp(from, to).await;
            let (late, huge) = (query(1, "late.test", A), query(2, "huge.test", TXT));
            write(&mut stream, &late).await;
            write(&mut stream, &huge).await;
            assert_eq!(read(&mut stream).await, answer_to(&huge, true), "60,000 bytes");
            assert_eq!(read(&mut stream).await, answer_to(&late, true));
            let refused = query(3, "example.com", A);
            write(&mut stream, &refused).await;
            assert_eq!(read(&mut stream).await.expect("an answer")[3], 5);
            assert_eq!(world.node.take(), [learned("late.test", "192.0.2.1", 60)]);
            assert_eq!(world.proxy.status().connections, 1);
            let (came, from) = (resolver.take(), from.parse::<IpAddr>().expect("an address"));
            assert!(came.len() == 2 && came.iter().all(|(peer, _)| peer.ip() == from), "{came:?}");
            for _ in 0..3 {
                assert_eq!(world.record().await.transport, Transport::Tcp);
            }
        }
    });
}

#[test]
fn a_refused_name_is_not_asked() {
    in_a_world(|mut world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let sent = with_edns(query(0x4321, "Example.COM", AAAA));
        let refused = world.ask(CLIENT, SERVER, &sent).await;
        assert_eq!(refused[..12], [0x43, 0x21, 0x81, 5, 0, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(refused[12..], sent[12..29], "the question as it was");
        assert_eq!(world.outcome().await, Outcome::Refused);
        assert!(resolver.take().is_empty() && world.node.take().is_empty());
    });
}

#[test]
fn what_the_proxy_does_not_know_passes_byte_for_byte() {
    in_a_world(|world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let mut sent = with_edns(query(7, "eCHo.tEst", 64));
        sent.extend(b"more than the message has");
        let answer = world.ask(CLIENT, SERVER, &sent).await;
        assert_eq!(Some(&answer), answer_to(&sent, false).as_ref());
        assert_eq!(resolver.take()[0].1[2..], sent[2..]);
        assert!(world.node.take().is_empty(), "no address");
    });
}

#[test]
fn addresses_are_learned_from_the_chain_of_the_name_alone() {
    in_a_world(|mut world| async move {
        let _resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let sent = query(7, "chain.test", A);
        assert_eq!(Some(world.ask(CLIENT, SERVER, &sent).await), answer_to(&sent, false), "all records pass");
        assert_eq!(world.node.take(), [learned("chain.test", "192.0.2.3", 30)]);
        world.outcome().await;

        let sent = query(7, "nx.test", A);
        assert_eq!(Some(world.ask(CLIENT, SERVER, &sent).await), answer_to(&sent, false));
        assert_eq!(world.outcome().await, Outcome::Answered { rcode: NXDOMAIN, addresses: 0 });
        let sent = query(7, "huge.test", A);
        assert_eq!(Some(world.ask(CLIENT, SERVER, &sent).await), answer_to(&sent, false), "truncated");
        assert_eq!(world.node.take(), [learned("huge.test", "192.0.2.1", 60)], "some clients use what is there");
    });
}

#[test]
fn two_queries_of_one_socket_and_answers_in_fragments() {
    in_a_world(|world| async move {
        let _resolver = Resolver::start(Some(&world.server), &[SERVER, SERVER_6]);
        world.serve().await;
        for (from, to) in [(CLIENT, SERVER), (CLIENT_6, SERVER_6)] {
            let socket = world.udp(from, to).await;
            let queries = [query(1, "a.test", A), query(2, "a.test", AAAA), query(3, "large.test", A)];
            let mut expected = queries.clone().map(|query| answer_to(&query, false).expect("an answer"));
            for query in &queries {
                socket.send(query).await.expect("sent");
            }
            let mut came = [receive(&socket).await, receive(&socket).await, receive(&socket).await];
            came.sort();
            expected.sort();
            assert_eq!(came, expected);
        }
    });
}

#[test]
fn answers_of_any_length_arrive() {
    in_a_world(|world| async move {
        let _resolver = Resolver::start(Some(&world.server), &[SERVER, SERVER_6]);
        world.serve().await;
        for (from, to) in [(CLIENT, SERVER), (CLIENT_6, SERVER_6)] {
            let socket = world.udp(from, to).await;
            for length in 1..20 {
                // The client's kernel drops what has a wrong checksum.
                let sent = query(length, &format!("{}.test", "x".repeat(length.into())), A);
                socket.send(&sent).await.expect("sent");
                assert_eq!(Some(receive(&socket).await), answer_to(&sent, false));
            }
        }
    });
}

#[test]
fn a_server_of_the_node_itself_keeps_its_port_and_is_asked() {
    in_a_world(|world| async move {
        // Without SO_REUSEADDR: nothing else can have its addresses.
        let resolver = Resolver::start(None, &[NODE, NODE_6]);
        world.serve().await;
        for (from, to) in [(CLIENT, NODE), (CLIENT_6, NODE_6)] {
            let sent = query(7, "www.test", A);
            assert_eq!(Some(world.ask(from, to, &sent).await), answer_to(&sent, false));
            let mut stream = world.tcp(from, to).await;
            write(&mut stream, &sent).await;
            assert_eq!(read(&mut stream).await, answer_to(&sent, true));
            assert!(resolver.take().iter().all(|(peer, _)| peer.ip().to_string() == to), "in the node's name");
            assert_eq!(world.node.take(), [learned("www.test", "192.0.2.1", 60), learned("www.test", "192.0.2.1", 60)]);
        }
    });
}
