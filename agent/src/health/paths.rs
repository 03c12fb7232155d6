//! With `--routing auto`, probes direct paths to other nodes until they have a verdict ([`wharf_cluster::paths`]): an
//! ICMP echo from router to router, and one to the next hop.

use std::{convert::Infallible, time::Duration};

use futures::{StreamExt as _, stream};
use wharf_cluster::paths::{Path, Probed};

use super::{mesh::AT_ONCE, probe::answers};
use crate::node::network::NodeNetwork;

/// Name of the controller.
pub const CONTROLLER: &str = "direct-paths";
/// Between two runs.
pub const INTERVAL: Duration = Duration::from_millis(500);
/// A run lasts a deadline per [`AT_ONCE`] paths.
const MAX_OF_RUN: usize = 64;

/// One run. Paths to down nodes stay open: too many paths are probed from a random one on.
pub async fn look(network: &NodeNetwork) -> Result<(), Infallible> {
    let mut open = network.cluster.open_paths(&network.routers()).await;
    if open.len() > MAX_OF_RUN {
        let first = usize::try_from(rand::random::<u32>()).unwrap_or_default() % open.len();
        open.rotate_left(first);
        open.truncate(MAX_OF_RUN);
    }
    if !open.is_empty() {
        let probed: Vec<Probed> = stream::iter(open).map(probe).buffer_unordered(AT_ONCE).collect().await;
        network.cluster.judge_paths(&probed).await;
    }
    Ok(())
}

async fn probe(path: Path) -> Probed {
    let (router, hop) = tokio::join!(answers(Some(path.from), path.router), answers(None, path.hop));
    Probed { path, router, hop }
}
