//! TLS, tokens and the order of servers, over TCP.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer},
    server::TlsStream,
};
use wharf_kube::{
    api::{
        Api,
        servers::{Servers, Settings},
    },
    source::Source,
};

use super::{
    common::{
        Bench,
        agent::Agent,
        objects::{expected, pod},
        server::Server,
        streams::WatchFault,
        until,
    },
    process::listen,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// A certificate authority, and the configuration of a server with a certificate for one name.
fn authority(name: &str) -> (String, TlsAcceptor) {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::new(Vec::new()).expect("parameters");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = params.self_signed(&key).expect("signed").pem();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().expect("a key");
    let params = CertificateParams::new(vec![name.to_owned()]).expect("parameters");
    let chain = vec![params.signed_by(&key, &issuer).expect("signed").der().clone()];
    let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
    (root, TlsAcceptor::from(Arc::new(config.with_single_cert(chain, key).expect("a certificate"))))
}

struct Tls {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl axum::serve::Listener for Tls {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, address)) = self.listener.accept().await else { continue };
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// Credentials in files, and an address that does not answer.
fn kubeconfig(directory: &Path, root: &str) -> std::path::PathBuf {
    let (path, ca, token) = (directory.join("kubeconfig"), directory.join("ca.pem"), directory.join("token"));
    fs::write(&ca, root).expect("written");
    let text = format!(
        "apiVersion: v1\nkind: Config\n\
         clusters: [{{name: c, cluster: {{server: \"https://127.0.0.1:1\", certificate-authority: \"{}\"}}}}]\n\
         users: [{{name: u, user: {{tokenFile: \"{}\"}}}}]\n\
         contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n",
        ca.display(),
        token.display()
    );
    fs::write(&path, text).expect("written");
    path
}

struct Setup {
    directory: tempfile::TempDir,
    server: Server,
    token: Arc<Mutex<String>>,
    settings: Settings,
    address: SocketAddr,
}

/// A server with a certificate for `name`; the client trusts the authority, unless another one is given.
async fn setup(name: &str, trusted: Option<String>) -> Setup {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Server::start();
    server.put(pod("web", "u1", Some("10.1.0.2"), "web"));
    let (root, acceptor) = authority(name);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let token = Arc::new(Mutex::new("first".to_owned()));
    fs::write(directory.path().join("token"), "first").expect("written");
    listen(&server, Tls { listener, acceptor }, Some(Arc::clone(&token)));
    let kubeconfig = Some(kubeconfig(directory.path(), &trusted.unwrap_or(root)));
    let settings = Settings { kubeconfig, explicit: Vec::new(), state_dir: None };
    Setup { directory, server, token, settings, address }
}

fn start(server: &Server, settings: Settings) -> Bench {
    let api = Api::new(Box::new(Arc::new(Servers::new(settings))));
    Bench::start_api(server.clone(), Agent::start(), api)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_known_server_is_used_and_a_new_token_is_read() {
    let Setup { directory, server, token, mut settings, address } = setup("kubernetes.default.svc", None).await;
    fs::write(directory.path().join("api-servers.json"), format!("[\"https://{address}\"]")).expect("written");
    settings.state_dir = Some(directory.path().to_owned());
    let bench = start(&server, settings);
    let holds = || bench.agent.is_complete() && bench.agent.rows() == expected(&server.objects());
    until("the rows", PATIENCE, holds).await;
    // The token is replaced; the old one is refused.
    "second".clone_into(&mut token.lock().expect("not poisoned"));
    fs::write(directory.path().join("token"), "second").expect("written");
    server.break_watches(WatchFault::Error(410));
    server.delete(Source::Pod, "shop/web");
    until("a deletion", PATIENCE, holds).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_trusted_certificate_has_no_request() {
    let (other, _) = authority("127.0.0.1");
    let untrusted = setup("127.0.0.1", Some(other)).await;
    // An explicit server needs a certificate for its own address.
    let misnamed = setup("kubernetes.default.svc", None).await;
    let trusted = setup("127.0.0.1", None).await;
    let run = |setup: &Setup| {
        let mut settings = setup.settings.clone();
        settings.explicit = vec![format!("https://{}", setup.address).parse().expect("a URL")];
        start(&setup.server, settings)
    };
    let _benches = [run(&untrusted), run(&misnamed)];
    let bench = run(&trusted);
    let holds = || bench.agent.is_complete() && bench.agent.rows() == expected(&trusted.server.objects());
    until("the rows of a trusted server", PATIENCE, holds).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(untrusted.server.requests(), Vec::<String>::new());
    assert_eq!(misnamed.server.requests(), Vec::<String>::new());
}
