//! Refused direct paths, kept in the state directory: otherwise each start would use them until they are probed again.

use std::{
    io,
    path::{Path, PathBuf},
};

use tokio::sync::Mutex;
use wharf_cluster::paths::{Refusals, Verdicts};
use wharf_kit::kept;

use super::{Cluster, blocking};

const FILE: &str = "paths.json";
/// Bytes; at most 8,192 rows of less than 2 KiB.
const MAX_FILE: u64 = 32 << 20;

pub(super) struct RefusalsFile {
    path: PathBuf,
    /// Held during a write: one at a time.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    written: Option<Refusals>,
    failed: Option<String>,
}

impl RefusalsFile {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { path: state_dir.join(FILE), state: Mutex::default() }
    }
}

impl Cluster {
    /// Before the first plan. A damaged file counts as absent.
    pub(super) async fn restore_refusals(&self) {
        if !self.probes_paths() {
            return;
        }
        let path = self.refusals.path.clone();
        let found = blocking(move || read(&path)).await;
        let mut state = self.refusals.state.lock().await;
        match found {
            Ok(found) => {
                let refusals = found.unwrap_or_default();
                self.looks.lock().await.verdicts = Verdicts::restore(refusals.clone());
                state.written = Some(refusals);
            }
            Err(why) => tracing::warn!(
                "read the refused direct paths in {}: {why}; all direct paths are probed",
                self.refusals.path.display()
            ),
        }
    }

    /// Writes changed refusals. Logs a failure; the next call retries.
    pub async fn keep_refusals(&self) {
        if !self.probes_paths() {
            return;
        }
        let mut state = self.refusals.state.lock().await;
        let unwritten = {
            let looks = self.looks.lock().await;
            let is_written = state.written.as_ref().is_some_and(|written| looks.verdicts.has(written));
            (!is_written).then(|| looks.verdicts.refusals())
        };
        let Some(refusals) = unwritten else { return };
        let (path, content) = (self.refusals.path.clone(), refusals.clone());
        match blocking(move || write(&path, &content)).await {
            Ok(()) => *state = State { written: Some(refusals), failed: None },
            Err(why) => {
                let file = self.refusals.path.display();
                let why = format!("keep the refused direct paths in {file}: {why}; a start would use older ones");
                if state.failed.as_ref() != Some(&why) {
                    tracing::warn!("{why}");
                }
                // The write may have failed after the rename.
                *state = State { written: None, failed: Some(why) };
            }
        }
    }
}

fn read(path: &Path) -> io::Result<Option<Refusals>> {
    let Some(text) = kept::read(path, MAX_FILE)? else { return Ok(None) };
    Ok(Some(serde_json::from_slice(&text)?))
}

fn write(path: &Path, refusals: &Refusals) -> io::Result<()> {
    kept::write(path, &serde_json::to_vec(refusals)?)
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use clap::Parser as _;
    use wharf_cluster::paths::{Path as DirectPath, Probed};
    use wharf_core::{
        kernel::NextHop,
        overlap::{NodeNetwork, Way},
    };
    use wharf_datapath::FakeKernel;

    use super::*;
    use crate::config::{AgentConfig, Flags};

    async fn start(directory: &Path) -> Cluster {
        start_with(directory, &format!("--cluster-file={}", directory.join("nodes.toml").display()), true).await
    }

    async fn start_with(directory: &Path, source: &str, has_address: bool) -> Cluster {
        let state = format!("--state-dir={}", directory.display());
        let flags = Flags::try_parse_from(["wharf-agent", "--node-name=a", &state, source]).expect("flags parse");
        let kernel = FakeKernel::new();
        let network = |net: &str, way| NodeNetwork { net: net.parse().expect("network"), way, ifname: None };
        let lan = Way::OnLink { by_kernel: true, point_to_point: false };
        let mut networks = vec![network("192.0.2.0/24", lan), network("192.0.2.1/32", Way::Address)];
        networks.truncate(if has_address { 2 } else { 1 });
        kernel.set_networks(networks);
        let cluster = Cluster::new(&AgentConfig::load(flags).expect("loads"), Arc::new(kernel));
        cluster.load("boot", Vec::new()).await.expect("nodes");
        cluster
    }

    fn set_address_of_b(directory: &Path, address: &str) {
        let text = format!(
            "[[node]]\nname = 'a'\naddresses = ['192.0.2.1']\n\n\
             [[node]]\nname = 'b'\naddresses = ['{address}']\npod-cidrs = ['10.2.0.0/24']\n\
             router-addresses = ['10.2.0.1']\n"
        );
        fs::write(directory.join("nodes.toml"), text).expect("written");
    }

    fn is_refused(cluster: &Cluster) -> bool {
        let in_force = cluster.in_force();
        let by_overlay = in_force.destinations.iter().all(|to| matches!(to.via, Ok(NextHop::Overlay { .. })));
        assert_eq!(in_force.detours.contains_key("b"), by_overlay, "{:?}", in_force.destinations);
        by_overlay
    }

    async fn refuse(cluster: &Cluster) {
        let path = DirectPath {
            node: "b".to_owned(),
            from: [10, 1, 0, 1].into(),
            router: [10, 2, 0, 1].into(),
            hop: [192, 0, 2, 2].into(),
        };
        for answers in [false, false, false, true, true, false, false, false, false] {
            cluster.judge_paths(&[Probed { path: path.clone(), router: Some(answers), hop: Some(true) }]).await;
        }
        cluster.look().await.expect("a plan");
    }

    #[tokio::test]
    async fn a_refused_path_is_in_force_at_the_next_start() {
        let directory = tempfile::tempdir().expect("directory");
        let (at, file) = (directory.path(), directory.path().join(FILE));
        set_address_of_b(at, "192.0.2.2");
        let first = start(at).await;
        first.keep_refusals().await;
        assert!(!is_refused(&first) && !file.exists(), "nothing to keep");
        refuse(&first).await;
        assert!(is_refused(&first));
        let blocked = at.join("paths.json.new");
        fs::create_dir(&blocked).expect("made");
        first.keep_refusals().await;
        assert!(!file.exists());
        fs::remove_dir(&blocked).expect("removed");
        first.keep_refusals().await;
        assert!(read(&file).expect("read").is_some());

        let second = start(at).await;
        assert!(is_refused(&second), "from the first plan on");
        second.note_applied(second.in_force(), Ok(Vec::new()));
        assert!(second.open_paths(&[[10, 1, 0, 1].into()]).await.is_empty(), "as of any refused path");
        set_address_of_b(at, "192.0.2.3");
        let third = start(at).await;
        third.note_applied(third.in_force(), Ok(Vec::new()));
        assert!(!is_refused(&third) && third.open_paths(&[[10, 1, 0, 1].into()]).await.len() == 1);
        third.keep_refusals().await;
        assert_eq!(read(&file).expect("read"), Some(Refusals::default()));
    }

    #[tokio::test]
    async fn a_refused_path_stays_while_the_own_address_or_the_own_row_is_missing() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        set_address_of_b(at, "192.0.2.2");
        let first = start(at).await;
        refuse(&first).await;
        first.keep_refusals().await;
        let kept = read(&at.join(FILE)).expect("read");
        let file = format!("--cluster-file={}", at.join("nodes.toml").display());
        let feed = format!("--cluster-feed={}", at.join("feed").display());
        for (source, has_address) in [(&file, false), (&feed, true)] {
            let started = start_with(at, source, has_address).await;
            assert!(started.in_force().detours.contains_key("b"), "{source}");
            started.keep_refusals().await;
            assert_eq!(read(&at.join(FILE)).expect("read"), kept, "{source}");
        }
        assert!(is_refused(&start(at).await));
    }

    #[tokio::test]
    async fn a_damaged_file_counts_as_absent_and_is_replaced() {
        let directory = tempfile::tempdir().expect("directory");
        let (at, file) = (directory.path(), directory.path().join(FILE));
        set_address_of_b(at, "192.0.2.2");
        for text in ["{", "[]", "{\"own\":[\"192.0.2.1\"],\"nodes\":[{\"name\":\"b\"}]}"] {
            fs::write(&file, text).expect("written");
            assert!(read(&file).is_err(), "{text}");
            let started = start(at).await;
            assert!(!is_refused(&started));
            started.keep_refusals().await;
            assert_eq!(read(&file).expect("read"), Some(Refusals::default()));
        }
    }
}
