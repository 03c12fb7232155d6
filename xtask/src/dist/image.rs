//! The container image: the static programs, as a tar of an OCI image layout.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Release, VERSION, output, tree};
use crate::pieces;

/// `dist/kubernetes/wharf.yaml` uses it.
const NAME: &str = "localhost/wharf";

/// User and group of `wharf-kube`. The host sees the number on the feed's socket, so it is outside of the ranges of
/// Debian's and systemd's accounts.
pub(super) const FEED: &str = "65588";

pub(super) fn make(release: &Release<'_>) -> Result<()> {
    let (root, layout) = (release.work.join("image"), release.work.join("oci"));
    for name in ["wharf-agent", "wharf", "wharf-node", "wharf-kube"] {
        copy(&release.sources.programs.join(name), &root.join("usr/bin").join(name), 0o755)?;
    }
    copy(&release.sources.programs.join("wharf-cni"), &root.join("opt/cni/bin/wharf-cni"), 0o755)?;
    let network = "10-wharf.conflist";
    copy(&release.sources.dist.join(network), &root.join("etc/cni/net.d").join(network), 0o644)?;
    copy(&release.sources.dist.join("agent.toml"), &root.join("etc/wharf/agent.toml"), 0o644)?;
    tree::add(&root, "usr/share/doc/wharf/LICENSE", &release.licence()?, 0o644)?;
    // `cluster-feed-group` is a name.
    tree::add(&root, "etc/group", format!("root:x:0:\nwharf-feed:x:{FEED}:\n").as_bytes(), 0o644)?;
    // Runtimes name namespaces by /var/run/netns.
    tree::link(&root, "var/run", "../run")?;
    // Mount points, which cannot be created later in a read-only root.
    for directory in ["run/wharf", "run/netns", "var/lib/wharf", "sys/fs/bpf", "proc", "tmp"] {
        let path = root.join(directory);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
    }

    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).with_context(|| format!("create {}", blobs.display()))?;
    let (plain, packed) = (release.work.join("layer.tar"), release.work.join("layer.tar.gz"));
    tree::tar(release.epoch, &root, ".", &plain)?;
    tree::gzip(&plain, &packed)?;
    let layer = blob(&blobs, &packed, "application/vnd.oci.image.layer.v1.tar+gzip")?;

    let created =
        output(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d"]).arg(format!("@{}", release.epoch)))?;
    let created = String::from_utf8_lossy(&created).trim().to_owned();
    let labels = json!({
        "org.opencontainers.image.title": "wharf",
        "org.opencontainers.image.version": VERSION,
        "org.opencontainers.image.licenses": "Apache-2.0 AND (GPL-2.0-only OR BSD-2-Clause)",
    });
    let config = json!({
        "created": created, "architecture": release.architecture, "os": "linux",
        "config": {"Entrypoint": ["/usr/bin/wharf-node", "run"], "Env": ["PATH=/usr/bin"], "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", tree::sha256(&plain)?)]},
        "history": [{"created": created, "created_by": "cargo xtask dist"}],
    });
    let config = json_blob(release, &blobs, &config, "application/vnd.oci.image.config.v1+json")?;
    let manifest = "application/vnd.oci.image.manifest.v1+json";
    let image = json!({"schemaVersion": 2, "mediaType": manifest, "config": config, "layers": [layer]});
    let mut image = json_blob(release, &blobs, &image, manifest)?;
    image["platform"] = json!({"architecture": release.architecture, "os": "linux"});
    let name = format!("{NAME}:{VERSION}");
    // containerd reads the second annotation.
    image["annotations"] = json!({"org.opencontainers.image.ref.name": name, "io.containerd.image.name": name});
    let index = "application/vnd.oci.image.index.v1+json";
    let index = json!({"schemaVersion": 2, "mediaType": index, "manifests": [image]});
    tree::add(&layout, "index.json", index.to_string().as_bytes(), 0o644)?;
    tree::add(&layout, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
    let archive = release.out.join(format!("wharf-{VERSION}-{}.oci.tar", release.architecture));
    tree::tar(release.epoch, &layout, ".", &archive)
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    let bytes = fs::read(from).with_context(|| format!("read {}", from.display()))?;
    pieces::put(to, &bytes, mode)
}

fn blob(blobs: &Path, file: &Path, media_type: &str) -> Result<Value> {
    let sum = tree::sha256(file)?;
    let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    let size = bytes.len();
    pieces::put(&blobs.join(&sum), &bytes, 0o644)?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{sum}"), "size": size}))
}

fn json_blob(release: &Release<'_>, blobs: &Path, value: &Value, media_type: &str) -> Result<Value> {
    let file = release.work.join("blob.json");
    fs::write(&file, value.to_string()).with_context(|| format!("write {}", file.display()))?;
    blob(blobs, &file, media_type)
}
