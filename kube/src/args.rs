//! Arguments of the program.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;
use http::Uri;

const EXAMPLE: &str = "\
Example, outside of a cluster:
  wharf-kube --node-name a --kubeconfig /etc/wharf/kubeconfig --api-server https://192.0.2.10:6443

RUST_LOG sets the log filter, such as wharf_kube=debug.";

/// Reports a Kubernetes cluster to the Wharf agent of this node over the cluster feed.
#[derive(Debug, Clone, Parser)]
#[command(name = "wharf-kube", version, after_help = EXAMPLE)]
pub struct Args {
    /// Name of this node's object in the cluster; the agent's --node-name.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// Socket of the agent's cluster feed.
    #[arg(long, value_name = "PATH", default_value = "/run/wharf/feed/feed.sock")]
    pub feed: PathBuf,
    /// Address and credentials of the API server [default: the service account of the pod].
    #[arg(long, value_name = "PATH")]
    pub kubeconfig: Option<PathBuf>,
    /// API server that is used before all others; repeat it for further servers, which are tried in turn.
    #[arg(long, value_name = "URL", value_parser = server)]
    pub api_server: Vec<Uri>,
    /// Directory for the last known addresses of the API servers.
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Address at which metrics are served, such as 127.0.0.1:9967.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics_listen: Option<SocketAddr>,
}

/// Parses a server's address.
///
/// # Errors
/// It is not `http` or `https` with a host and without a query.
fn server(text: &str) -> Result<Uri, String> {
    let uri: Uri = text.parse().map_err(|error| format!("it is no URL: {error}"))?;
    let is_web = matches!(uri.scheme_str(), Some("https" | "http"));
    if !is_web || uri.host().is_none_or(str::is_empty) || uri.query().is_some() {
        return Err("write https://HOST:PORT".to_owned());
    }
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_urls_and_keep_their_order() {
        let parsed = Args::try_parse_from([
            "wharf-kube",
            "--node-name=a",
            "--api-server=https://192.0.2.1:6443",
            "--api-server=https://[2001:db8::1]:6443",
        ])
        .expect("parsed");
        let shown: Vec<String> = parsed.api_server.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["https://192.0.2.1:6443/", "https://[2001:db8::1]:6443/"]);
        for bad in ["192.0.2.1:6443", "ftp://a", "https://", "https://a?b=c", "unix:///x"] {
            assert!(server(bad).is_err(), "{bad}");
        }
    }
}
