//! TLS, tokens and the order of servers, over TCP.

use std::{fs, net::SocketAddr, sync::Arc, time::Duration};

use tokio::net::TcpListener;
use wharf_kube::{
    api::{
        Api,
        servers::{Servers, Settings},
    },
    source::Source,
};

use super::common::{
    Bench,
    agent::Agent,
    objects::{expected, pod},
    server::Server,
    streams::WatchFault,
    tls::{Authority, Secrets, kubeconfig, listen},
    until,
};

const PATIENCE: Duration = Duration::from_secs(20);

struct Setup {
    directory: tempfile::TempDir,
    server: Server,
    secrets: Secrets,
    settings: Settings,
    address: SocketAddr,
}

impl Setup {
    /// The file of the certificate authority that the client trusts, or of its token.
    fn write(&self, file: &str, text: &str) {
        fs::write(self.directory.path().join(file), text).expect("written");
    }

    fn use_explicit_address(&mut self) {
        self.settings.explicit = vec![format!("https://{}", self.address).parse().expect("a URL")];
    }
}

/// A server with a certificate for `name`; the client trusts `trusted`. The configured address does not answer.
async fn setup(name: &str, authority: &Authority, trusted: &Authority) -> Setup {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Server::start();
    server.put(pod("web", "u1", Some("10.1.0.2"), "web"));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let secrets = Secrets::new(authority.acceptor(name), "first");
    listen(&server, listener, Some(secrets.clone()));
    let [config, ca, token] = ["kubeconfig", "ca.pem", "token"].map(|file| directory.path().join(file));
    fs::write(&config, kubeconfig("https://127.0.0.1:1", Some([&ca, &token]))).expect("written");
    let settings = Settings { kubeconfig: Some(config), explicit: Vec::new(), state_dir: None };
    let setup = Setup { directory, server, secrets, settings, address };
    setup.write("ca.pem", trusted.root());
    setup.write("token", "first");
    setup
}

fn start(server: &Server, settings: Settings) -> Bench {
    let api = Api::new(Box::new(Arc::new(Servers::new(settings))));
    Bench::start_api(server.clone(), Agent::start(), api)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_known_server_is_used_and_a_new_token_is_read() {
    let authority = Authority::make();
    let mut setup = setup("kubernetes.default.svc", &authority, &authority).await;
    setup.write("api-servers.json", &format!("[\"https://{}\"]", setup.address));
    setup.settings.state_dir = Some(setup.directory.path().to_owned());
    let bench = start(&setup.server, setup.settings.clone());
    let holds = || bench.agent.is_complete() && bench.agent.rows() == expected(&setup.server.objects());
    until("the rows", PATIENCE, holds).await;
    // The token expires before its file has the next one.
    let before = setup.secrets.unauthorized();
    setup.secrets.set_token("second");
    setup.server.break_watches(WatchFault::Error(410));
    until("a refused token", PATIENCE, || setup.secrets.unauthorized() > before).await;
    setup.write("token", "second");
    setup.server.delete(Source::Pod, "shop/web");
    until("a deletion", PATIENCE, holds).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_certificate_authority_is_read() {
    let (old, new) = (Authority::make(), Authority::make());
    let mut setup = setup("127.0.0.1", &old, &old).await;
    setup.use_explicit_address();
    let bench = start(&setup.server, setup.settings.clone());
    let holds = || bench.agent.is_complete() && bench.agent.rows() == expected(&setup.server.objects());
    until("the rows", PATIENCE, holds).await;
    // The server's certificate is of the new authority before the file is.
    setup.secrets.set_acceptor(new.acceptor("127.0.0.1"));
    setup.server.break_watches(WatchFault::Cut);
    setup.server.delete(Source::Pod, "shop/web");
    let is_distrusted = || bench.agent.watch(Source::Pod).is_some_and(|(state, _)| state == "failing");
    until("a failed connection", PATIENCE, is_distrusted).await;
    assert!(!holds(), "the old authority is trusted only");
    setup.write("ca.pem", new.root());
    until("a deletion", PATIENCE, holds).await;
    // The file has both authorities while the server's certificate is replaced again, as in a planned rotation.
    let last = Authority::make();
    setup.write("ca.pem", &format!("{}{}", new.root(), last.root()));
    setup.server.break_watches(WatchFault::Cut);
    setup.server.put(pod("db", "u2", Some("10.1.0.3"), "db"));
    until("a pod", PATIENCE, holds).await;
    setup.secrets.set_acceptor(last.acceptor("127.0.0.1"));
    setup.server.break_watches(WatchFault::Cut);
    setup.server.delete(Source::Pod, "shop/db");
    until("a later deletion", PATIENCE, holds).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_trusted_certificate_has_no_request() {
    let (authority, other) = (Authority::make(), Authority::make());
    let mut untrusted = setup("127.0.0.1", &authority, &other).await;
    // An explicit server needs a certificate for its own address.
    let mut misnamed = setup("kubernetes.default.svc", &authority, &authority).await;
    let mut trusted = setup("127.0.0.1", &authority, &authority).await;
    let run = |setup: &mut Setup| {
        setup.use_explicit_address();
        start(&setup.server, setup.settings.clone())
    };
    let _benches = [run(&mut untrusted), run(&mut misnamed)];
    let bench = run(&mut trusted);
    let holds = || bench.agent.is_complete() && bench.agent.rows() == expected(&trusted.server.objects());
    until("the rows of a trusted server", PATIENCE, holds).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(untrusted.server.requests(), Vec::<String>::new());
    assert_eq!(misnamed.server.requests(), Vec::<String>::new());
}
