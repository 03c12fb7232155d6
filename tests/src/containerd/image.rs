//! An image without a registry: one static busybox, packed as `ctr images import` reads it (OCI image layout).

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

/// Name of the image.
pub const IMAGE: &str = "localhost/busybox:wharf";

/// The programs of the image, all of them busybox.
const APPLETS: [&str; 8] = ["cat", "echo", "httpd", "ip", "ping", "sh", "sleep", "wget"];
/// Directories that a container's mounts are put on, and one for files that `httpd` serves.
const DIRECTORIES: [&str; 7] = ["bin", "dev", "etc", "proc", "sys", "tmp", "www"];

/// The archive. A container of it sleeps if it is told nothing else, as a sandbox's own does.
pub(super) fn archive(busybox: &[u8]) -> Result<Vec<u8>> {
    let mut layer = Builder::new(Vec::new());
    for directory in DIRECTORIES {
        append(&mut layer, directory, &[], EntryType::Directory)?;
    }
    append(&mut layer, "bin/busybox", busybox, EntryType::Regular)?;
    for applet in APPLETS {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_mode(0o777);
        header.set_size(0);
        layer.append_link(&mut header, format!("bin/{applet}"), "busybox").context("pack a link")?;
    }
    let layer = layer.into_inner().context("end the layer")?;
    let config = json!({
        "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        "os": "linux",
        "config": {"Entrypoint": ["/bin/sleep", "infinity"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
    });
    let config = config.to_string().into_bytes();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
    });
    let manifest = manifest.to_string().into_bytes();
    let mut listed = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
    listed["annotations"] = json!({"io.containerd.image.name": IMAGE});
    let index = json!({"schemaVersion": 2, "manifests": [listed]}).to_string();

    let mut archive = Builder::new(Vec::new());
    append(&mut archive, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, EntryType::Regular)?;
    append(&mut archive, "index.json", index.as_bytes(), EntryType::Regular)?;
    for blob in [&layer, &config, &manifest] {
        append(&mut archive, &format!("blobs/{}", digest(blob).replace(':', "/")), blob, EntryType::Regular)?;
    }
    archive.into_inner().context("end the image")
}

fn append(archive: &mut Builder<Vec<u8>>, path: &str, content: &[u8], kind: EntryType) -> Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o755);
    header.set_size(u64::try_from(content.len()).context("size of a file")?);
    archive.append_data(&mut header, path, content).with_context(|| format!("pack {path}"))
}

fn descriptor(kind: &str, blob: &[u8]) -> serde_json::Value {
    json!({"mediaType": kind, "digest": digest(blob), "size": blob.len()})
}

fn digest(blob: &[u8]) -> String {
    let hex: String = Sha256::digest(blob).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}
