//! The program as a process: a kubeconfig, an API server over TCP, the agent's socket, SIGTERM.

use std::{
    fs,
    process::{Command, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;

use super::common::{
    agent::Agent,
    objects::{expected, node, pod},
    server::Server,
    tls::{kubeconfig, listen},
    until,
};
use wharf_kube::source::Source;

const PATIENCE: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program_feeds_the_agent_and_ends_at_sigterm() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Server::start();
    server.put(node("a", "192.0.2.1", "10.1.0.0/24"));
    server.put(pod("web", "u1", Some("10.1.0.2"), "web"));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    listen(&server, listener, None);
    let config = directory.path().join("kubeconfig");
    fs::write(&config, kubeconfig("http://127.0.0.1:1", None)).expect("written");
    let agent = Agent::start();
    let socket = directory.path().join("feed.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).expect("bound"));
    tokio::spawn(tonic::transport::Server::builder().add_service(agent.service()).serve_with_incoming(incoming));

    // The configured address does not answer; the explicit one does.
    let mut program = Command::new(env!("CARGO_BIN_EXE_wharf-kube"))
        .args(["--node-name=a", "--api-server=http://127.0.0.1:1"])
        .arg(format!("--api-server=http://{address}"))
        .arg(format!("--feed={}", socket.display()))
        .arg(format!("--kubeconfig={}", config.display()))
        .arg(format!("--state-dir={}", directory.path().display()))
        .stdin(Stdio::null())
        .spawn()
        .expect("started");
    let holds = || agent.is_complete() && agent.rows() == expected(&server.objects());
    until("the rows", PATIENCE, holds).await;
    server.put(pod("db", "u2", Some("10.1.0.3"), "db"));
    until("a new row", PATIENCE, holds).await;
    let annotated = || server.object(Source::Node, "a").is_some_and(|node| node["metadata"]["annotations"].is_object());
    until("the annotations", PATIENCE, annotated).await;
    until("the row with the annotations", PATIENCE, holds).await;

    kill(Pid::from_raw(program.id().try_into().expect("a pid")), Signal::SIGTERM).expect("signalled");
    let status = tokio::task::spawn_blocking(move || program.wait()).await.expect("joined").expect("ended");
    assert!(status.success(), "{status}");
    assert!(agent.rows() == expected(&server.objects()), "nothing is removed at the end");
}

#[test]
fn usage_has_an_example_and_wrong_arguments_exit_with_2() {
    let run = |arguments: &[&str]| {
        let program = env!("CARGO_BIN_EXE_wharf-kube");
        Command::new(program).args(arguments).env_remove("NODE_NAME").output().expect("started")
    };
    let help = run(&["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("wharf-kube --node-name a"));
    assert_eq!(run(&[]).status.code(), Some(2));
    assert_eq!(run(&["--node-name=a", "--api-server=nowhere"]).status.code(), Some(2));
}
