//! API servers, tried in turn: explicit addresses, last known addresses, the configured address.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use futures::future::BoxFuture;
use http::Uri;
use kube_client::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use super::{Connect, Failure};

/// Name in every API server's certificate, which may lack the server's address.
const SERVER_NAME: &str = "kubernetes.default.svc";
const FILE: &str = "api-servers.json";
/// Bytes of the file.
const MAX_FILE: u64 = 64 << 10;
const MAX_KNOWN: usize = 32;

#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// File with address and credentials; `None` uses the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// Used before all others.
    pub explicit: Vec<Uri>,
    /// Stores the known addresses.
    pub state_dir: Option<PathBuf>,
}

struct State {
    /// Text, as in the file.
    known: Vec<String>,
    is_stored: bool,
    /// Random rotation of `known`, which spreads the nodes over the servers.
    first: usize,
}

/// Creates clients for the servers in turn.
pub struct Servers {
    settings: Settings,
    /// Shared by connecting tasks and the task of [`super::endpoints`]. Held without an await.
    state: Mutex<State>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Server {
    /// The certificate must have the URL's host.
    Explicit(Uri),
    /// The certificate must have [`SERVER_NAME`].
    Known(Uri),
    Configured,
}

impl Servers {
    /// Loads the state directory. An unreadable file is reported and counts as empty.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let known = settings.state_dir.as_deref().map(load).unwrap_or_default();
        Self { settings, state: Mutex::new(State { known, is_stored: false, first: rand::random_range(0..MAX_KNOWN) }) }
    }

    /// Replaces the known addresses, and writes them when they differ.
    ///
    /// # Errors
    /// The file system's; the addresses are used nevertheless.
    pub fn learn(&self, mut addresses: Vec<String>) -> io::Result<()> {
        addresses.sort();
        addresses.dedup();
        addresses.truncate(MAX_KNOWN);
        {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            // A server answered, so an empty list is wrong.
            if addresses.is_empty() || (state.known == addresses && state.is_stored) {
                return Ok(());
            }
            state.known.clone_from(&addresses);
            state.is_stored = false;
        }
        if let Some(directory) = &self.settings.state_dir {
            store(directory, &addresses)?;
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner).is_stored = true;
        Ok(())
    }

    fn server(&self, attempt: usize) -> Server {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut known: Vec<Server> = state.known.iter().filter_map(|url| url.parse().ok()).map(Server::Known).collect();
        let count = known.len().max(1);
        known.rotate_left(state.first % count);
        let mut all: Vec<Server> = self.settings.explicit.iter().cloned().map(Server::Explicit).collect();
        all.append(&mut known);
        all.push(Server::Configured);
        let at = attempt % all.len();
        all.swap_remove(at)
    }

    async fn config(&self) -> Result<Config, Failure> {
        let Some(path) = &self.settings.kubeconfig else {
            // Explicit servers need no address in the environment.
            return Config::incluster_env().or_else(|_| Config::incluster_dns()).map_err(Failure::settings);
        };
        let file = Kubeconfig::read_from(path).map_err(Failure::settings)?;
        Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(Failure::settings)
    }
}

impl Connect for Arc<Servers> {
    fn connect(&self, attempt: usize) -> BoxFuture<'_, Result<Client, Failure>> {
        Box::pin(async move {
            let mut config = self.config().await?;
            // The watch layer retries.
            config.default_retry = false;
            match self.server(attempt) {
                Server::Configured => {}
                Server::Explicit(uri) => {
                    config.cluster_url = uri;
                    config.tls_server_name = None;
                }
                Server::Known(uri) => {
                    config.cluster_url = uri;
                    config.tls_server_name.get_or_insert_with(|| SERVER_NAME.to_owned());
                }
            }
            tracing::info!(server = %config.cluster_url, "connect to the API server");
            // Credentials may be the output of a program, which this call starts and awaits.
            let made = tokio::task::spawn_blocking(|| Client::try_from(config)).await;
            made.map_err(Failure::settings)?.map_err(Failure::settings)
        })
    }
}

fn load(directory: &Path) -> Vec<String> {
    let path = directory.join(FILE);
    let read = || -> io::Result<Vec<String>> {
        let meta = fs::metadata(&path)?;
        if !meta.is_file() || meta.len() > MAX_FILE {
            return Err(io::Error::other("it is no file of at most 64 KiB"));
        }
        Ok(serde_json::from_slice(&fs::read(&path)?)?)
    };
    match read() {
        Ok(known) => known.into_iter().take(MAX_KNOWN).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the last known API servers cannot be read");
            Vec::new()
        }
    }
}

/// A crash leaves the old or the new file.
fn store(directory: &Path, known: &[String]) -> io::Result<()> {
    let (path, new) = (directory.join(FILE), directory.join(format!("{FILE}.new")));
    let file = fs::File::create(&new)?;
    serde_json::to_writer(&file, known)?;
    file.sync_all()?;
    fs::rename(&new, &path)?;
    fs::File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(directory: &Path) -> Settings {
        let explicit = vec!["https://192.0.2.1:6443".parse().expect("a URL")];
        Settings { kubeconfig: None, explicit, state_dir: Some(directory.to_owned()) }
    }

    #[test]
    fn servers_are_tried_in_turn_and_known_ones_survive_a_restart() {
        let directory = tempfile::tempdir().expect("a directory");
        let servers = Servers::new(settings(directory.path()));
        let known = vec!["https://192.0.2.9:6443".to_owned()];
        servers.learn(known.clone()).expect("written");
        servers.learn(Vec::new()).expect("ignored");
        let again = Servers::new(settings(directory.path()));
        let order: Vec<Server> = (0..4).map(|attempt| again.server(attempt)).collect();
        let [explicit, known] =
            ["https://192.0.2.1:6443", "https://192.0.2.9:6443"].map(|url| url.parse::<Uri>().expect("a URL"));
        let explicit = Server::Explicit(explicit);
        assert_eq!(order, [explicit.clone(), Server::Known(known), Server::Configured, explicit]);
    }

    #[test]
    fn a_damaged_file_has_no_addresses() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join(FILE), "{").expect("written");
        assert_eq!(Servers::new(settings(directory.path())).state.into_inner().expect("no panic").known.len(), 0);
    }
}
