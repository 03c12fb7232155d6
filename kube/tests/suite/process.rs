//! The program as a process: a kubeconfig, an API server over TCP, the agent's socket, SIGTERM.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    sync::{Arc, Mutex},
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
    streams, until,
};
use wharf_kube::source::Source;

const PATIENCE: Duration = Duration::from_secs(20);

/// Serves until the runtime ends. With a token, other requests are answered with 401.
pub fn listen<L: axum::serve::Listener>(server: &Server, listener: L, token: Option<Arc<Mutex<String>>>)
where
    L::Addr: std::fmt::Debug,
{
    let server = server.clone();
    let answer = move |request: axum::extract::Request| {
        let (server, token) = (server.clone(), token.clone());
        async move {
            let (parts, body) = request.into_parts();
            let wanted = token.map(|token| format!("Bearer {}", token.lock().expect("not poisoned")));
            let found = parts.headers.get("authorization").and_then(|value| value.to_str().ok());
            if wanted.is_some_and(|wanted| Some(wanted.as_str()) != found) {
                return streams::status(401, None).map(axum::body::Body::new);
            }
            let body = axum::body::to_bytes(body, 1 << 20).await.expect("a body");
            let target = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
            let answer = server.answer(parts.method, target, body).await;
            answer.expect("no reset is scripted").map(axum::body::Body::new)
        }
    };
    let routes = axum::Router::new().fallback(answer);
    tokio::spawn(async { axum::serve(listener, routes).await });
}

fn kubeconfig(directory: &Path, server: &str) -> std::path::PathBuf {
    let path = directory.join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\nclusters: [{{name: c, cluster: {{server: \"{server}\"}}}}]\n\
         users: [{{name: u, user: {{token: secret}}}}]\ncontexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
         current-context: x\n"
    );
    fs::write(&path, text).expect("written");
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_program_feeds_the_agent_and_ends_at_sigterm() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Server::start();
    server.put(node("a", "192.0.2.1", "10.1.0.0/24"));
    server.put(pod("web", "u1", Some("10.1.0.2"), "web"));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    listen(&server, listener, None);
    let agent = Agent::start();
    let socket = directory.path().join("feed.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&socket).expect("bound"));
    tokio::spawn(tonic::transport::Server::builder().add_service(agent.service()).serve_with_incoming(incoming));

    // The configured address does not answer; the explicit one does.
    let mut program = Command::new(env!("CARGO_BIN_EXE_wharf-kube"))
        .args(["--node-name=a", "--api-server=http://127.0.0.1:1"])
        .arg(format!("--api-server=http://{address}"))
        .arg(format!("--feed={}", socket.display()))
        .arg(format!("--kubeconfig={}", kubeconfig(directory.path(), "http://127.0.0.1:1").display()))
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
