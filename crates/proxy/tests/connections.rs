//! Whose connections a listener takes, and which TLS handshakes pass.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod world;

use std::collections::BTreeSet;

use nix::sys::resource::{Resource, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use wharf_policy::{
    model::Direction,
    requests::{HttpRule, Requests, ServerName},
};
use wharf_proxy::{Connections, Content, ListenerKey, Member, Share, Verdict};
use world::{tls::client_hello, *};

const GET: &str = "GET / HTTP/1.1\r\nHost: a";

#[test]
fn a_handshake_passes_for_its_name_alone() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = byte_server(SERVER).await;
        let mut world = World::start();
        let names = BTreeSet::from([ServerName::Exact("a.test".into()), ServerName::Under("b.test".into())]);
        let requests = Requests { server_names: names, ..Requests::default() };
        world.ensure(listener(EGRESS, Direction::Egress, requests, &[(7, &[CLIENT]), (8, &[OTHER_CLIENT])])).await;
        let cases = [
            (Some("a.test"), true),
            (Some("x.a.test"), false),
            (Some("b.test"), false),
            (Some("x.b.test"), true),
            (Some("x.y.b.test"), true),
            (Some("xb.test"), false),
            (None, false),
        ];
        for (client, (name, passes)) in [CLIENT, OTHER_CLIENT].into_iter().cycle().zip(cases) {
            let hello = client_hello(name);
            let mut stream = connect(client, SERVER).await;
            if passes {
                stream.write_all(&hello).await.expect("sent");
                let mut back = vec![0; hello.len()];
                let read = tokio::time::timeout(LONG, stream.read_exact(&mut back)).await.expect("in time");
                read.unwrap_or_else(|error| panic!("{name:?}: {error}"));
                assert_eq!(back, hello, "{name:?}: the handshake itself reaches the server");
                drop(stream);
            } else {
                assert_eq!(exchange(stream, &hello).await, "", "{name:?}");
            }
            let record = world.record().await;
            let verdict = if passes { Verdict::Forwarded } else { Verdict::Denied };
            assert_eq!(record.verdict, verdict, "{name:?}: {record:?}");
            assert_eq!(record.member.id, if client == CLIENT { 7 } else { 8 });
            assert_eq!(record.content, Content::Tls { server_name: name.unwrap_or_default().into() });
        }
        let answer = request(CLIENT, GET).await;
        assert!(answer.starts_with("HTTP/1.1 403 "), "without TLS nothing is allowed: {answer}");
    });
}

#[test]
fn only_members_are_served_and_each_by_its_own_address() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let mut world = World::start();
        let everything = || allow([HttpRule::default()]);
        // 8 has no address of its own: 9, the later one, has it too.
        let members: &[(u16, &[&str])] =
            &[(7, &[CLIENT, CLIENT_6]), (8, &[OTHER_CLIENT]), (9, &[OTHER_CLIENT]), (10, &[])];
        world.ensure(listener(EGRESS, Direction::Egress, everything(), members)).await;
        assert!(request(CLIENT, GET).await.contains(&format!("peer {CLIENT}\n")));
        assert_eq!(world.record().await.member.id, 7);
        assert!(request(OTHER_CLIENT, GET).await.contains(&format!("peer {OTHER_CLIENT}\n")));
        assert_eq!(world.record().await.member.id, 9);
        assert_eq!(request(STRANGER, GET).await, "", "no member: closed; a member without addresses takes nobody in");
    });
}

#[test]
fn ipv6_is_served_by_the_same_port() {
    in_a_namespace(|| async {
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER_6).await;
        let world = World::start();
        let everything = allow([HttpRule::default()]);
        world.ensure(listener(EGRESS, Direction::Egress, everything, &[(7, &[CLIENT, CLIENT_6])])).await;
        let stream = connect(CLIENT_6, SERVER_6).await;
        let answer = exchange(stream, format!("{GET}\r\nConnection: close\r\n\r\n").as_bytes()).await;
        assert!(answer.contains(&format!("peer {CLIENT_6}\n")), "{answer}");
    });
}

#[test]
fn an_ingress_listener_serves_the_servers_that_are_members() {
    in_a_namespace(|| async {
        redirect(15002, Direction::Ingress);
        let _server = echo_server(SERVER).await;
        let mut world = World::start();
        world.ensure(listener(15002, Direction::Ingress, allow([get("/a")]), &[(9, &[SERVER])])).await;
        let answer = request(STRANGER, "GET /a HTTP/1.1\r\nHost: a").await;
        assert!(answer.contains(&format!("peer {STRANGER}\n")), "{answer}");
        let record = world.record().await;
        assert_eq!((record.listener.to_string().as_str(), record.member.id), ("ingress-15002", 9));
        assert!(request(STRANGER, GET).await.starts_with("HTTP/1.1 403 "));
        world.ensure(listener(15002, Direction::Ingress, allow([get("/a")]), &[(9, &[CLIENT])])).await;
        assert_eq!(request(STRANGER, "GET /a HTTP/1.1\r\nHost: a").await, "", "the server is no member");
    });
}

#[test]
fn behind_a_published_port_the_destination_is_the_server() {
    in_a_namespace(|| async {
        redirect(15002, Direction::Ingress);
        publish(OTHER_CLIENT, 8080);
        let _server = echo_server(SERVER).await;
        let mut world = World::start();
        world.ensure(listener(15002, Direction::Ingress, allow([get("/a")]), &[(9, &[SERVER])])).await;
        let stream = tokio::net::TcpStream::connect((OTHER_CLIENT, 8080)).await.expect("a connection");
        let answer = exchange(stream, b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        let record = world.record().await;
        let server = Some((SERVER_ADDRESS, PORT).into());
        assert_eq!((record.destination, record.server), (server, server), "not the port that is published");
    });
}

#[test]
fn a_connection_to_the_listeners_own_port_is_closed() {
    in_a_namespace(|| async {
        let world = World::start();
        world.ensure(listener(PORT, Direction::Egress, allow([HttpRule::default()]), &[(7, &[CLIENT])])).await;
        // It would be sent to itself for ever.
        assert_eq!(request(CLIENT, GET).await, "");
        // Nor is one waited for that says nothing: who reaches the node's address could hold as many as there may be.
        let mut silent = connect(CLIENT, SERVER).await;
        let mut byte = [0];
        let closed = silent.read(&mut byte);
        let read = tokio::time::timeout(std::time::Duration::from_secs(5), closed).await.expect("closed at once");
        assert!(matches!(read, Ok(0) | Err(_)), "{read:?}");
    });
}

#[test]
fn an_endpoint_spends_its_share_and_no_other_ones() {
    in_a_namespace(|| async {
        // Of these files Envoy keeps 512, and takes half as many connections as are left.
        setrlimit(Resource::RLIMIT_NOFILE, 1536, 1536).expect("a limit");
        redirect(EGRESS, Direction::Egress);
        let _server = echo_server(SERVER).await;
        let world = World::start();
        let members: &[(u16, &[&str])] = &[(7, &[CLIENT]), (8, &[OTHER_CLIENT])];
        let everything = || allow([HttpRule::default()]);
        world.ensure(listener(EGRESS, Direction::Egress, everything(), members)).await;
        let Connections { all, of_listener, of_endpoint, .. } = world.proxy.status().connections;
        assert_eq!((all, of_listener, of_endpoint), (512, 128, 32));
        let own =
            Share::Endpoint(ListenerKey { direction: Direction::Egress, port: EGRESS }, Member { id: 7, epoch: 107 });

        let half_a_header = async || {
            let mut stream = connect(CLIENT, SERVER).await;
            // Envoy may have closed the connection already.
            drop(stream.write_all(b"GET / HTTP/1.1\r\nHost: a\r\nX: ").await);
            stream
        };
        let mut held = Vec::new();
        for _ in 0..of_endpoint {
            held.push(half_a_header().await);
        }
        // Envoy's workers accept connections one by one, so a connection is known to be held when it is not closed for
        // a while.
        let spent = async {
            loop {
                let mut stream = half_a_header().await;
                match tokio::time::timeout(std::time::Duration::from_millis(200), stream.read(&mut [0])).await {
                    Ok(_) => return,
                    Err(_) => held.push(stream),
                }
            }
        };
        tokio::time::timeout(LONG, spent).await.expect("no connection beyond the share");
        assert!(request(OTHER_CLIENT, GET).await.starts_with("HTTP/1.1 200 "), "another endpoint has its own");
        let told = async {
            while !world.proxy.status().spent.contains_key(&own) {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await
            }
        };
        tokio::time::timeout(LONG, told).await.expect("it is told");
        drop(held);
        let served = async { while request(CLIENT, GET).await.is_empty() {} };
        tokio::time::timeout(LONG, served).await.expect("the share is free again");

        // Connections without a first byte are no endpoint's yet. They leave another listener what it needs.
        let mut silent = Vec::new();
        for _ in 0..all + 8 {
            silent.push(connect(CLIENT, SERVER).await);
        }
        redirect_again(EGRESS + 1, Direction::Egress);
        world.ensure(listener(EGRESS + 1, Direction::Egress, everything(), members)).await;
        assert!(request(OTHER_CLIENT, GET).await.starts_with("HTTP/1.1 200 "), "another listener has its own");
    });
}
