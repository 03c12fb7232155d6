//! Servers, clients and nodes that do not do what they should.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod world;

use std::{net::UdpSocket as StdUdpSocket, time::Instant};

use nix::sys::socket::{setsockopt, sockopt};
use tokio::{io::AsyncWriteExt, net::UdpSocket};
use wharf_dns::{Malformed, Outcome};
use world::{
    message::{A, address, answer, query},
    resolver::{Resolver, answer_to, read, write},
    *,
};

const SERVFAIL: u8 = 2;

#[test]
fn the_client_gets_no_address_before_the_node_has_learned_it() {
    in_a_world(|mut world| async move {
        let _resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        world.node.will(Act::Wait);
        let sent = query(7, "www.test", A);
        let socket = world.udp(CLIENT, SERVER).await;
        socket.send(&sent).await.expect("sent");
        silence(&socket).await;
        assert_eq!(world.node.take().len(), 1, "it waits for the node");
        assert_eq!(world.proxy.status().pending, 1);
        world.node.go.notify_one();
        assert_eq!(Some(receive(&socket).await), answer_to(&sent, false));
        world.outcome().await;

        world.node.will(Act::Fail);
        assert_eq!(world.ask(CLIENT, SERVER, &sent).await[3], SERVFAIL);
        assert_eq!(world.outcome().await, Outcome::NotLearned("the map is full".into()));

        world.node.will(Act::Never);
        let mut stream = world.tcp(CLIENT, SERVER).await;
        write(&mut stream, &sent).await;
        let began = Instant::now();
        assert_eq!(read(&mut stream).await.expect("an answer")[..4], [0, 7, 0x81, SERVFAIL]);
        assert!(began.elapsed().as_millis() >= 1900, "{:?}", began.elapsed());
        assert_eq!(world.outcome().await, Outcome::NotLearned("it took more than 2 s".into()));
        assert_eq!(world.proxy.status().totals["not-learned"], 2);
    });
}

#[test]
fn an_endpoint_that_is_gone_gets_no_answer_and_the_next_one_with_its_address_neither() {
    in_a_world(|mut world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let mut stream = world.tcp(CLIENT, SERVER).await;
        write(&mut stream, &query(7, "late.test", A)).await;
        resolver.until(1).await;
        let mut listener = listener();
        let (mut member, addresses) = listener.members.pop_first().expect("a member");
        member.epoch += 1000;
        listener.members.insert(member, addresses);
        world.proxy.set([(PORT, listener)].into()).await;
        assert_eq!(world.outcome().await, Outcome::Gone);
        assert!(world.node.take().is_empty());
        // The connection is as good as a new one.
        write(&mut stream, &query(8, "www.test", A)).await;
        assert_eq!(read(&mut stream).await.expect("an answer")[..2], [0, 8]);
        assert_eq!(world.node.take()[0].member, member);
    });
}

#[test]
fn a_connection_of_an_earlier_round_is_closed_at_its_next_query() {
    in_a_world(|world| async move {
        let _resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let mut before = world.tcp(CLIENT, SERVER).await;
        write(&mut before, &query(7, "www.test", A)).await;
        assert_eq!(read(&mut before).await.expect("an answer")[..2], [0, 7]);
        let mut listener = listener();
        let (member, _) = listener.members.first_key_value().expect("a member");
        listener.rounds = [(*member, 1)].into();
        world.proxy.set([(PORT, listener)].into()).await;
        write(&mut before, &query(8, "www.test", A)).await;
        assert!(read(&mut before).await.is_none(), "other rules may judge it now");
        let mut now = world.tcp(CLIENT, SERVER).await;
        write(&mut now, &query(9, "www.test", A)).await;
        assert_eq!(read(&mut now).await.expect("an answer")[..2], [0, 9]);
    });
}

/// A socket of the server's namespace at the port of a real one's.
fn server_socket(world: &World, ip: &'static str, port: u16) -> UdpSocket {
    let socket = world.server.run(move || {
        let socket = StdUdpSocket::bind((ip, port)).expect("a socket");
        socket.set_nonblocking(true).expect("nonblocking");
        socket
    });
    UdpSocket::from_std(socket).expect("a socket")
}

#[test]
fn forged_answers_are_ignored() {
    in_a_world(|mut world| async move {
        world.serve().await;
        let real = server_socket(&world, SERVER, 53);
        let other_port = server_socket(&world, SERVER, 5353);
        let impostor = server_socket(&world, IMPOSTOR, 53);
        let sent = query(7, "www.test", A);
        let socket = world.udp(CLIENT, SERVER).await;
        socket.send(&sent).await.expect("sent");
        let mut asked = vec![0; 512];
        let (length, proxy) = real.recv_from(&mut asked).await.expect("a query");
        asked.truncate(length);
        let good = answer(&asked, 0, &[address("www.test", "192.0.2.1", 60)]);
        let evil = answer(&asked, 0, &[address("www.test", "192.0.2.66", 60)]);
        other_port.send_to(&evil, proxy).await.expect("sent");
        impostor.send_to(&evil, proxy).await.expect("sent");
        let changed = |place: usize, bits: u8| {
            let mut message = evil.clone();
            message[place] ^= bits;
            message
        };
        let mut clients_id = evil.clone();
        clients_id[..2].copy_from_slice(&sent[..2]);
        // The id; no answer; another opcode; another name; another type; no question; two; nothing.
        for forged in [
            changed(0, 0x40),
            changed(1, 0x01),
            changed(2, 0x80),
            changed(2, 0x08),
            changed(14, 1),
            changed(23, 1),
            changed(5, 1),
            changed(5, 3),
            evil[..11].to_vec(),
            Vec::new(),
        ] {
            real.send_to(&forged, proxy).await.expect("sent");
        }
        if clients_id != evil {
            real.send_to(&clients_id, proxy).await.expect("sent");
        }
        silence(&socket).await;
        assert!(world.node.take().is_empty());
        real.send_to(&good, proxy).await.expect("sent");
        let mut expected = good.clone();
        expected[..2].copy_from_slice(&sent[..2]);
        assert_eq!(receive(&socket).await, expected);
        assert_eq!(world.node.take()[0].addresses[0].0.to_string(), "192.0.2.1");
        world.outcome().await;
        // Too late: the socket is gone.
        real.send_to(&evil, proxy).await.expect("sent");
        silence(&socket).await;
        assert!(world.node.take().is_empty());
    });
}

#[test]
fn a_server_that_is_not_there_fails_at_once_and_a_silent_one_after_5_s() {
    in_a_world(|mut world| async move {
        world.serve().await;
        let sent = query(7, "www.test", A);
        let began = Instant::now();
        // Nobody has the port: an ICMP error for UDP, a reset for TCP.
        for (from, to) in [(CLIENT, SERVER), (CLIENT_6, SERVER_6)] {
            assert_eq!(world.ask(from, to, &sent).await[3], SERVFAIL);
            let Outcome::Failed(why) = world.outcome().await else { panic!("an error") };
            assert!(why.contains("refused"), "{why}");
        }
        let mut stream = world.tcp(CLIENT, SERVER).await;
        write(&mut stream, &sent).await;
        assert_eq!(read(&mut stream).await.expect("an answer")[3], SERVFAIL);
        assert!(matches!(world.outcome().await, Outcome::Failed(_)));
        // The node has no route.
        assert_eq!(world.ask(CLIENT, "203.0.113.1", &sent).await[3], SERVFAIL);
        let Outcome::Failed(why) = world.outcome().await else { panic!("an error") };
        assert!(why.contains("unreachable"), "{why}");
        assert!(began.elapsed().as_secs() < 4, "{:?}", began.elapsed());

        let _resolver = Resolver::start(Some(&world.server), &[SERVER]);
        let socket = world.udp(CLIENT, SERVER).await;
        socket.send(&query(8, "unreadable.test", A)).await.expect("sent");
        assert_eq!(receive(&socket).await[..4], [0, 8, 0x81, SERVFAIL]);
        assert_eq!(world.outcome().await, Outcome::Unreadable);
        write(&mut stream, &query(9, "closing.test", A)).await;
        assert_eq!(read(&mut stream).await.expect("an answer")[..4], [0, 9, 0x81, SERVFAIL]);
        let Outcome::Failed(why) = world.outcome().await else { panic!("an error") };
        assert!(why.contains("closed"), "{why}");

        let began = Instant::now();
        socket.send(&query(10, "silent.test", A)).await.expect("sent");
        let record = world.record().await;
        assert_eq!((record.outcome, record.took), (Outcome::Unanswered, None));
        assert!(began.elapsed().as_millis() >= 4900, "{:?}", began.elapsed());
        silence(&socket).await;
        assert_eq!(world.proxy.status().pending, 0);
    });
}

#[test]
fn a_server_that_floods_is_given_up_and_others_have_their_turn() {
    in_a_world(|mut world| async move {
        world.serve().await;
        let real = server_socket(&world, SERVER, 53);
        let socket = world.udp(CLIENT, SERVER).await;
        socket.send(&query(7, "www.test", A)).await.expect("sent");
        let mut asked = vec![0; 512];
        let (length, proxy) = real.recv_from(&mut asked).await.expect("a query");
        asked.truncate(length);
        asked[1] ^= 1;
        let real = real.into_std().expect("a socket");
        let (ended, end) = std::sync::mpsc::channel::<()>();
        let flood = std::thread::spawn(move || {
            let began = Instant::now();
            while matches!(end.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) && began.elapsed() < LONG {
                // The queue may be full.
                real.send_to(&answer(&asked, 0, &[]), proxy).ok();
            }
            began.elapsed()
        });
        assert_eq!(receive(&socket).await[..4], [0, 7, 0x81, SERVFAIL]);
        drop(ended);
        let Outcome::Failed(why) = world.outcome().await else { panic!("an error") };
        assert!(why.contains("1000 messages"), "{why}");
        let took = flood.join().expect("the flood");
        assert!(took.as_secs() < 5, "{took:?}");
    });
}

#[test]
fn clients_that_are_no_members_and_what_was_not_redirected_get_nothing() {
    in_a_world(|world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let sent = query(7, "www.test", A);
        let socket = world.udp(STRANGER, SERVER).await;
        socket.send(&sent).await.expect("sent");
        silence(&socket).await;
        let mut stream = world.tcp(STRANGER, SERVER).await;
        assert_eq!(read(&mut stream).await, None, "closed");
        // From the node, to the listener itself.
        let direct = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        direct.send_to(&sent, ("127.0.0.1", PORT)).await.expect("sent");
        silence(&direct).await;
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", PORT)).await.expect("a connection");
        assert_eq!(read(&mut stream).await, None, "closed");
        assert_eq!(world.proxy.status().strangers, 4);
        assert!(resolver.take().is_empty() && world.proxy.status().totals.is_empty());
    });
}

#[test]
fn messages_that_are_no_queries_are_answered_by_their_kind_or_dropped() {
    in_a_world(|mut world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let good = query(0x1234, "www.test", A);
        let changed = |place: usize, byte: u8| {
            let mut message = good.clone();
            message[place] = byte;
            message
        };
        let (formerr, notimp) = (1, 4);
        for (message, code, why) in [
            (changed(5, 0), formerr, Malformed::Questions(0)),
            (changed(5, 2), formerr, Malformed::Questions(2)),
            (changed(12, 0xc0), formerr, Malformed::Question),
            (good[..20].to_vec(), formerr, Malformed::Question),
            (changed(2, 5 << 3), notimp, Malformed::Kind(5)),
            (query(0x1234, "www.test", 252), notimp, Malformed::Transfer),
        ] {
            let reply = world.ask(CLIENT, SERVER, &message).await;
            assert_eq!((&reply[..2], reply[3], reply.len()), (&good[..2], code, 12), "{why}");
            assert_eq!(world.outcome().await, Outcome::Malformed(why));
        }
        for (message, why) in [
            (good[..11].to_vec(), Malformed::Short),
            (Vec::new(), Malformed::Short),
            (changed(2, 0x80), Malformed::Answer),
        ] {
            let socket = world.udp(CLIENT, SERVER).await;
            socket.send(&message).await.expect("sent");
            assert_eq!(world.outcome().await, Outcome::Malformed(why));
            silence(&socket).await;
            let mut stream = world.tcp(CLIENT, SERVER).await;
            write(&mut stream, &message).await;
            assert_eq!(read(&mut stream).await, None, "closed");
            assert_eq!(world.outcome().await, Outcome::Malformed(why));
        }
        assert!(resolver.take().is_empty());
        // The proxy goes on.
        assert_eq!(world.ask(CLIENT, SERVER, &good).await[3] & 0x0f, 0);
    });
}

#[test]
fn an_endpoint_has_a_hundred_queries_and_sixteen_connections_at_once() {
    in_a_world(|mut world| async move {
        let resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let socket = world.udp(CLIENT, SERVER).await;
        setsockopt(&socket, sockopt::RcvBuf, &1_000_000).expect("a buffer");
        for id in 0..100 {
            socket.send(&query(id, "silent.test", A)).await.expect("sent");
            tokio::task::yield_now().await;
        }
        resolver.until(100).await;
        assert_eq!(world.proxy.status().pending, 100);
        socket.send(&query(100, "www.test", A)).await.expect("sent");
        assert_eq!(receive(&socket).await[..4], [0, 100, 0x81, SERVFAIL]);
        assert_eq!(world.outcome().await, Outcome::Overloaded);
        assert_eq!(world.ask(OTHER_CLIENT, SERVER, &query(7, "www.test", A)).await[3] & 0x0f, 0, "another client");
        world.outcome().await;
        for _ in 0..100 {
            assert_eq!(world.outcome().await, Outcome::Unanswered);
        }
        assert_eq!(world.proxy.status().pending, 0);

        let mut streams = Vec::new();
        for _ in 0..16 {
            let mut stream = world.tcp(CLIENT, SERVER).await;
            write(&mut stream, &query(1, "www.test", A)).await;
            read(&mut stream).await.expect("an answer");
            streams.push(stream);
        }
        let mut stream = world.tcp(CLIENT, SERVER).await;
        assert_eq!(read(&mut stream).await, None, "closed");
        let mut stream = world.tcp(CLIENT_6, SERVER_6).await;
        assert_eq!(read(&mut stream).await, None, "its other address has no share more");
        assert_eq!((world.proxy.status().connections, world.proxy.status().connections_refused), (16, 2));
        let mut stream = world.tcp(OTHER_CLIENT, SERVER).await;
        write(&mut stream, &query(1, "www.test", A)).await;
        read(&mut stream).await.expect("an answer");
    });
}

#[test]
fn a_connection_without_a_whole_query_is_closed_after_10_s() {
    in_a_world(|world| async move {
        let _resolver = Resolver::start(Some(&world.server), &[SERVER]);
        world.serve().await;
        let mut half = world.tcp(CLIENT, SERVER).await;
        half.write_all(&[0, 40, 1, 2, 3]).await.expect("written");
        let mut idle = world.tcp(CLIENT, SERVER).await;
        write(&mut idle, &query(1, "www.test", A)).await;
        read(&mut idle).await.expect("an answer");
        let began = Instant::now();
        let end = async { tokio::join!(read(&mut half), read(&mut idle)) };
        let ends = tokio::time::timeout(LONG, end).await.expect("both are closed");
        assert_eq!(ends, (None, None));
        assert!(began.elapsed().as_secs() >= 9, "{:?}", began.elapsed());
        assert_eq!(world.proxy.status().connections, 0);
    });
}
