//! The scripted API server over TCP and TLS, with bearer tokens.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, crypto::ring, pki_types::PrivateKeyDer},
    server::TlsStream,
};

use super::{server::Server, streams};

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    root: String,
}

impl Authority {
    pub fn make() -> Self {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root = params.self_signed(&key).expect("signed").pem();
        Self { issuer: Issuer::new(params, key), root }
    }

    /// Its certificate, PEM.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// For a server with a certificate for one host name or address.
    pub fn acceptor(&self, name: &str) -> TlsAcceptor {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("parameters");
        let chain = vec![params.signed_by(&key, &self.issuer).expect("signed").der().clone()];
        let key = PrivateKeyDer::try_from(key.serialize_der()).expect("a key");
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().expect("versions").with_no_client_auth();
        TlsAcceptor::from(Arc::new(config.with_single_cert(chain, key).expect("a certificate")))
    }
}

/// Certificate and token of a server, for new connections and requests.
#[derive(Clone)]
pub struct Secrets {
    acceptor: Arc<Mutex<TlsAcceptor>>,
    token: Arc<Mutex<String>>,
    unauthorized: Arc<AtomicUsize>,
}

impl Secrets {
    pub fn new(acceptor: TlsAcceptor, token: &str) -> Self {
        let token = Arc::new(Mutex::new(token.to_owned()));
        Self { acceptor: Arc::new(Mutex::new(acceptor)), token, unauthorized: Arc::default() }
    }

    pub fn set_acceptor(&self, acceptor: TlsAcceptor) {
        *self.acceptor.lock().expect("not poisoned") = acceptor;
    }

    pub fn set_token(&self, token: &str) {
        token.clone_into(&mut self.token.lock().expect("not poisoned"));
    }

    /// Requests with another token.
    pub fn unauthorized(&self) -> usize {
        self.unauthorized.load(Ordering::SeqCst)
    }

    fn allows(&self, authorization: Option<&str>) -> bool {
        let is_allowed =
            authorization == Some(&format!("Bearer {}", self.token.lock().expect("not poisoned").as_str()));
        self.unauthorized.fetch_add(usize::from(!is_allowed), Ordering::SeqCst);
        is_allowed
    }
}

struct Tls {
    listener: TcpListener,
    secrets: Secrets,
}

impl axum::serve::Listener for Tls {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, address)) = self.listener.accept().await else { continue };
            let acceptor = self.secrets.acceptor.lock().expect("not poisoned").clone();
            if let Ok(stream) = acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// Serves until the runtime ends. With secrets, the connections are TLS, and requests with another token are answered
/// with 401.
pub fn listen(server: &Server, listener: TcpListener, secrets: Option<Secrets>) {
    let routes = routes(server, secrets.clone());
    match secrets {
        Some(secrets) => tokio::spawn(async { axum::serve(Tls { listener, secrets }, routes).await }),
        None => tokio::spawn(async { axum::serve(listener, routes).await }),
    };
}

fn routes(server: &Server, secrets: Option<Secrets>) -> axum::Router {
    let server = server.clone();
    let answer = move |request: axum::extract::Request| {
        let (server, secrets) = (server.clone(), secrets.clone());
        async move {
            let (parts, body) = request.into_parts();
            let authorization = parts.headers.get("authorization").and_then(|value| value.to_str().ok());
            if secrets.is_some_and(|secrets| !secrets.allows(authorization)) {
                return streams::status(401, None).map(axum::body::Body::new);
            }
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap_or_default();
            let target = parts.uri.path_and_query().map(ToString::to_string).unwrap_or_default();
            let answer = server.answer(parts.method, target, body).await;
            answer.unwrap_or_else(|_| streams::reset()).map(axum::body::Body::new)
        }
    };
    axum::Router::new().fallback(answer)
}

/// Text of a kubeconfig. `files`: the certificate authority and the token; a fixed token without them.
pub fn kubeconfig(server: &str, files: Option<[&Path; 2]>) -> String {
    let (authority, token) = match files {
        Some([authority, token]) => (
            format!(", certificate-authority: \"{}\"", authority.display()),
            format!("tokenFile: \"{}\"", token.display()),
        ),
        None => (String::new(), "token: secret".to_owned()),
    };
    format!(
        "apiVersion: v1\nkind: Config\n\
         clusters: [{{name: c, cluster: {{server: \"{server}\"{authority}}}}}]\n\
         users: [{{name: u, user: {{{token}}}}}]\n\
         contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\ncurrent-context: x\n"
    )
}
