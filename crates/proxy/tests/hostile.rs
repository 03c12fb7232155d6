//! What a client that is no Envoy of ours gets from the server.

#![allow(clippy::expect_used, clippy::panic, reason = "a test says what it expects by failing")]

mod world;

use std::time::Duration;

use envoy_types::pb::envoy::{
    config::core::v3::Node,
    service::{
        accesslog::v3::access_log_service_client::AccessLogServiceClient,
        discovery::v3::{
            DeltaDiscoveryRequest, DeltaDiscoveryResponse,
            aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
        },
    },
};
use tokio::{net::UnixStream, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Code, Status, Streaming,
    transport::{Channel, Endpoint},
};
use wharf_policy::model::Direction;
use wharf_proxy::EnvoyState;
use world::*;

const LISTENERS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";

type Requests = mpsc::Sender<DeltaDiscoveryRequest>;

async fn client(world: &World) -> AggregatedDiscoveryServiceClient<Channel> {
    AggregatedDiscoveryServiceClient::new(channel(world).await)
}

async fn channel(world: &World) -> Channel {
    let socket = world.envoy.directory.join("xds.sock");
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).expect("an address");
    endpoint.connect().await.expect("a connection")
}

async fn open(
    client: &mut AggregatedDiscoveryServiceClient<Channel>,
    first: DeltaDiscoveryRequest,
) -> Result<(Requests, Streaming<DeltaDiscoveryResponse>), Status> {
    let (sender, requests) = mpsc::channel(4);
    sender.send(first).await.expect("room");
    let answers = client.delta_aggregated_resources(ReceiverStream::new(requests)).await?;
    Ok((sender, answers.into_inner()))
}

fn first(node: &str, type_url: &str) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        node: Some(Node { id: node.into(), ..Node::default() }),
        type_url: type_url.into(),
        ..DeltaDiscoveryRequest::default()
    }
}

async fn refusal(client: &mut AggregatedDiscoveryServiceClient<Channel>, request: DeltaDiscoveryRequest) -> Code {
    let answer = async {
        let (_requests, mut answers) = open(client, request).await?;
        answers.message().await
    };
    match tokio::time::timeout(LONG, answer).await.expect("in time") {
        Err(status) => status.code(),
        Ok(answer) => panic!("{answer:?}"),
    }
}

#[test]
fn foreign_nodes_and_requests_without_measure_are_refused() {
    in_a_namespace(|| async {
        let world = World::without_envoy();
        let mut client = client(&world).await;
        assert_eq!(refusal(&mut client, first("another", LISTENERS)).await, Code::PermissionDenied);
        assert_eq!(refusal(&mut client, DeltaDiscoveryRequest::default()).await, Code::PermissionDenied);
        let many = |count: usize, length: usize| DeltaDiscoveryRequest {
            resource_names_subscribe: vec!["a".repeat(length); count],
            ..first("wharf", LISTENERS)
        };
        assert_eq!(refusal(&mut client, many(5000, 1)).await, Code::InvalidArgument);
        assert_eq!(refusal(&mut client, many(1, 1000)).await, Code::InvalidArgument);
        assert_eq!(refusal(&mut client, many(3000, 1000)).await, Code::OutOfRange, "more bytes than are read");
        assert_eq!(world.proxy.status().connected_streams, 0);

        let mut streams = Vec::new();
        for _ in 0..8 {
            let (requests, mut answers) = open(&mut client, first("wharf", LISTENERS)).await.expect("a stream");
            answers.message().await.expect("an answer").expect("an answer");
            streams.push((requests, answers));
        }
        assert_eq!(refusal(&mut client, first("wharf", LISTENERS)).await, Code::ResourceExhausted);
        assert_eq!(world.proxy.status().connected_streams, 8);
    });
}

#[test]
fn answers_to_no_response_end_no_wait_and_a_stream_of_garbage_harms_no_other() {
    in_a_namespace(|| async {
        let world = World::without_envoy();
        let mut client = client(&world).await;
        let (requests, mut answers) = open(&mut client, first("wharf", LISTENERS)).await.expect("a stream");
        answers.message().await.expect("an answer").expect("an answer");
        let wait = world.proxy.ensure(listener(EGRESS, Direction::Egress, allow([]), &[(7, &[CLIENT])]));
        for nonce in ["", "0-0", "1-1", "1-18446744073709551616", "x"] {
            let request = DeltaDiscoveryRequest { response_nonce: nonce.into(), ..first("wharf", LISTENERS) };
            requests.send(request).await.expect("room");
        }
        // An answer to another type shows that all of these have been read.
        requests.send(first("wharf", "another")).await.expect("room");
        let answer = answers.message().await.expect("an answer").expect("an answer");
        assert_eq!(answer.type_url, "another");
        assert_eq!(world.proxy.status().pending_waits, 1, "the first response is not acknowledged");
        drop((requests, answers));

        let (requests, mut answers) = open(&mut client, first("wharf", LISTENERS)).await.expect("a stream");
        let answer = answers.message().await.expect("an answer").expect("an answer");
        assert_eq!(answer.resources.len(), 1);
        let right = DeltaDiscoveryRequest { response_nonce: answer.nonce, ..first("wharf", LISTENERS) };
        requests.send(right).await.expect("room");
        wait.within(LONG).await.expect("acknowledged");
    });
}

#[test]
fn an_envoy_that_the_supervisor_does_not_know_is_not_served() {
    in_a_namespace(|| async {
        let world = World::start();
        world.ensure(listener(EGRESS, Direction::Egress, allow([]), &[(7, &[CLIENT])])).await;
        let pid = world.proxy.status().pid;
        // This process, in the node's name.
        assert_eq!(refusal(&mut client(&world).await, first("wharf", LISTENERS)).await, Code::PermissionDenied);
        assert_eq!(world.proxy.status().pid, pid);
        world.ensure(listener(EGRESS, Direction::Egress, allow([]), &[])).await;
    });
}

#[test]
fn before_the_supervisor_has_an_envoy_none_is_served() {
    in_a_namespace(|| async {
        let mut world = World::without_envoy();
        world.envoy.program = "/nonexistent/envoy".into();
        world.proxy.serve_only_supervised();
        assert_eq!(refusal(&mut client(&world).await, first("wharf", LISTENERS)).await, Code::Unavailable, "not yet");
        world.supervise();
        let wait = world.proxy.ensure(listener(EGRESS, Direction::Egress, allow([]), &[(7, &[CLIENT])]));
        let failed = async {
            while world.proxy.status().last_error.is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONG, failed).await.expect("it cannot start");
        // As one that an earlier agent started and did not note.
        assert_eq!(refusal(&mut client(&world).await, first("wharf", LISTENERS)).await, Code::Unavailable);
        drop(wait);
    });
}

#[test]
fn the_streams_of_a_process_that_a_later_one_has_replaced_end() {
    in_a_namespace(|| async {
        let world = World::without_envoy();
        let mut client = client(&world).await;
        let (_requests, mut answers) = open(&mut client, first("wharf", LISTENERS)).await.expect("a stream");
        answers.message().await.expect("an answer").expect("an answer");
        world.envoy.prepare().expect("its settings");
        let mut envoy = tokio::process::Command::new(&world.envoy.program)
            .args(["--disable-hot-restart", "--log-level", "off", "--concurrency", "1", "--config-path"])
            .arg(world.envoy.directory.join("bootstrap.json"))
            .kill_on_drop(true)
            .spawn()
            .expect("an Envoy");
        let ended = tokio::time::timeout(LONG, answers.message()).await.expect("in time").expect_err("an end");
        assert_eq!(ended.code(), Code::Aborted, "{ended}");
        world.ensure(listener(EGRESS, Direction::Egress, allow([]), &[(7, &[CLIENT])])).await;
        // It began before the one that is served, and would be replaced by it again.
        assert_eq!(refusal(&mut client, first("wharf", LISTENERS)).await, Code::PermissionDenied);
        assert_eq!(world.proxy.status().pid.map(i32::unsigned_abs), envoy.id());
        envoy.kill().await.expect("it ends");
        drop(open(&mut client, first("wharf", LISTENERS)).await.expect("served again"));
    });
}

#[test]
fn connections_beyond_the_limit_wait_until_another_one_ends() {
    in_a_namespace(|| async {
        let world = World::without_envoy();
        let socket = world.envoy.directory.join("xds.sock");
        let mut idle = Vec::new();
        for _ in 0..64 {
            idle.push(UnixStream::connect(&socket).await.expect("a connection"));
        }
        let mut client = client(&world).await;
        let mut opened = std::pin::pin!(open(&mut client, first("wharf", LISTENERS)));
        let soon = tokio::time::timeout(Duration::from_millis(300), &mut opened).await;
        assert!(soon.is_err(), "it is served beside 64 others");
        drop(idle.pop());
        tokio::time::timeout(LONG, opened).await.expect("in time").expect("a stream");
    });
}

#[test]
fn a_socket_whose_directory_is_removed_is_bound_again() {
    in_a_namespace(|| async {
        let world = World::without_envoy();
        let (_requests, mut answers) =
            open(&mut client(&world).await, first("wharf", LISTENERS)).await.expect("a stream");
        answers.message().await.expect("an answer").expect("an answer");
        std::fs::remove_dir_all(&world.envoy.directory).expect("removed");
        let again = async {
            while UnixStream::connect(world.envoy.directory.join("xds.sock")).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LONG, again).await.expect("bound again");
        let (_more, mut more) = open(&mut client(&world).await, first("wharf", LISTENERS)).await.expect("a stream");
        more.message().await.expect("an answer").expect("an answer");
        assert!(world.envoy.bootstrap_path().exists(), "somebody may start an Envoy with them");
    });
}

#[tokio::test]
async fn a_socket_that_cannot_be_bound_is_tried_again() {
    let root = tempfile::tempdir().expect("a directory");
    let directory = root.path().join("envoy");
    std::fs::write(&directory, "in its place").expect("a file");
    let envoy = wharf_proxy::Envoy {
        program: "envoy".into(),
        directory: directory.clone(),
        user: None,
        threads: 1,
        ends_with_agent: true,
    };
    let (proxy, _records) = wharf_proxy::Proxy::new(1);
    let served = proxy.serve(envoy.socket(), std::future::pending());
    let connected = async {
        std::fs::remove_file(&directory).expect("removed");
        while UnixStream::connect(directory.join("xds.sock")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        ended = served => panic!("{ended:?}"),
        result = tokio::time::timeout(LONG, connected) => result.expect("bound in the end"),
    }
}

#[test]
fn a_stream_that_sends_nothing_is_not_counted_and_ends() {
    in_a_namespace(|| async {
        let world = World::without_envoy();
        let (mut client, mut silent) = (client(&world).await, Vec::new());
        for _ in 0..8 {
            let (sender, requests) = mpsc::channel::<DeltaDiscoveryRequest>(1);
            let answers = client.delta_aggregated_resources(ReceiverStream::new(requests)).await.expect("a stream");
            silent.push((sender, answers.into_inner()));
        }
        assert_eq!(refusal(&mut client, first("wharf", LISTENERS)).await, Code::ResourceExhausted);
        let status = world.proxy.status();
        assert_eq!((status.connected_streams, status.state), (0, EnvoyState::Absent));
        for (_, answers) in &mut silent {
            let ended = tokio::time::timeout(LONG, answers.message()).await.expect("in time").expect_err("an end");
            assert_eq!(ended.code(), Code::DeadlineExceeded, "{ended}");
        }
        let (_requests, mut answers) = open(&mut client, first("wharf", LISTENERS)).await.expect("a stream");
        answers.message().await.expect("an answer").expect("an answer");
        assert_eq!(world.proxy.status().connected_streams, 1);
    });
}

#[test]
fn records_are_taken_from_the_envoy_that_is_served_alone() {
    in_a_namespace(|| async {
        let world = World::start();
        world.ensure(listener(EGRESS, Direction::Egress, allow([]), &[(7, &[CLIENT])])).await;
        let (_sender, messages) = mpsc::channel(1);
        let mut logs = AccessLogServiceClient::new(channel(&world).await);
        let answer = logs.stream_access_logs(ReceiverStream::new(messages));
        let refused = tokio::time::timeout(LONG, answer).await.expect("in time").expect_err("an end");
        assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    });
}
