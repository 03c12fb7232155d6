//! Archives of OCI image layouts.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{output, tree};
use crate::pieces;

pub(crate) struct Image<'a> {
    pub(crate) root: &'a Path,
    /// Complete, with a tag.
    pub(crate) names: &'a [String],
    /// Field `config` of the image configuration.
    pub(crate) config: Value,
}

impl Image<'_> {
    /// `epoch`: Unix seconds, for all files and the image; `work`: temporary files.
    pub(crate) fn write(&self, architecture: &str, epoch: u64, work: &Path, archive: &Path) -> Result<()> {
        let layout = work.join("oci");
        let blobs = layout.join("blobs/sha256");
        fs::create_dir_all(&blobs).with_context(|| format!("create {}", blobs.display()))?;
        let (plain, packed) = (work.join("layer.tar"), work.join("layer.tar.gz"));
        tree::tar(epoch, self.root, ".", &plain)?;
        tree::gzip(&plain, &packed)?;
        let layer = blob(&blobs, &packed, "application/vnd.oci.image.layer.v1.tar+gzip")?;

        let created = output(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d"]).arg(format!("@{epoch}")))?;
        let created = String::from_utf8_lossy(&created).trim().to_owned();
        let config = json!({
            "created": created, "architecture": architecture, "os": "linux", "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{}", tree::sha256(&plain)?)]},
            "history": [{"created": created, "created_by": "cargo xtask dist"}],
        });
        let config = json_blob(work, &blobs, &config, "application/vnd.oci.image.config.v1+json")?;
        let manifest = "application/vnd.oci.image.manifest.v1+json";
        let image = json!({"schemaVersion": 2, "mediaType": manifest, "config": config, "layers": [layer]});
        let image = json_blob(work, &blobs, &image, manifest)?;
        let named = self.names.iter().map(|name| {
            let mut image = image.clone();
            image["platform"] = json!({"architecture": architecture, "os": "linux"});
            // The second one is for containerd.
            image["annotations"] = json!({"org.opencontainers.image.ref.name": name, "io.containerd.image.name": name});
            image
        });
        let index = "application/vnd.oci.image.index.v1+json";
        let index = json!({"schemaVersion": 2, "mediaType": index, "manifests": named.collect::<Vec<_>>()});
        tree::add(&layout, "index.json", index.to_string().as_bytes(), 0o644)?;
        tree::add(&layout, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644)?;
        tree::tar(epoch, &layout, ".", archive)
    }
}

fn blob(blobs: &Path, file: &Path, media_type: &str) -> Result<Value> {
    let sum = tree::sha256(file)?;
    let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    let size = bytes.len();
    pieces::put(&blobs.join(&sum), &bytes, 0o644)?;
    Ok(json!({"mediaType": media_type, "digest": format!("sha256:{sum}"), "size": size}))
}

fn json_blob(work: &Path, blobs: &Path, value: &Value, media_type: &str) -> Result<Value> {
    let file = work.join("blob.json");
    fs::write(&file, value.to_string()).with_context(|| format!("write {}", file.display()))?;
    blob(blobs, &file, media_type)
}
