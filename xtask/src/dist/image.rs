//! The container image: static programs in an OCI archive.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::json;

use super::{Release, VERSION, oci::Image, tree};
use crate::pieces;

/// As in `dist/kubernetes/wharf.yaml`.
const NAME: &str = "localhost/wharf";

/// User and group of `wharf-kube`, visible on the feed's socket: outside of account ranges of Debian and systemd.
pub(super) const FEED: &str = "65588";

pub(super) fn make(release: &Release<'_>) -> Result<PathBuf> {
    let root = release.work.join("image");
    for name in ["wharf-agent", "wharf", "wharf-node", "wharf-kube"] {
        copy(&release.sources.programs.join(name), &root.join("usr/bin").join(name), 0o755)?;
    }
    copy(&release.sources.programs.join("wharf-cni"), &root.join("opt/cni/bin/wharf-cni"), 0o755)?;
    let network = "10-wharf.conflist";
    copy(&release.sources.dist.join(network), &root.join("etc/cni/net.d").join(network), 0o644)?;
    copy(&release.sources.dist.join("agent.toml"), &root.join("etc/wharf/agent.toml"), 0o644)?;
    tree::add(&root, "usr/share/doc/wharf/LICENSE", &release.licence()?, 0o644)?;
    // For `cluster-feed-group`, a name.
    tree::add(&root, "etc/group", format!("root:x:0:\nwharf-feed:x:{FEED}:\n").as_bytes(), 0o644)?;
    // Runtimes name namespaces by /var/run/netns.
    tree::link(&root, "var/run", "../run")?;
    // Mount points: the root may be read-only.
    for directory in ["run/wharf", "run/netns", "var/lib/wharf", "sys/fs/bpf", "proc", "tmp"] {
        let path = root.join(directory);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    }

    let labels = json!({
        "org.opencontainers.image.title": "wharf",
        "org.opencontainers.image.version": VERSION,
        "org.opencontainers.image.licenses": "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
    });
    let config = json!({"Entrypoint": ["/usr/bin/wharf-node", "run"], "Env": ["PATH=/usr/bin"], "Labels": labels});
    let archive = release.out.join(format!("wharf-{VERSION}-{}.oci.tar", release.architecture));
    let image = Image { root: &root, names: &[format!("{NAME}:{VERSION}")], config };
    image.write(release.architecture, release.epoch, &release.work, &archive)?;
    Ok(archive)
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("read {}", from.display()))?;
    pieces::put(to, &bytes, mode)
}
