//! Images of the test pods, made from the machine's programs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::{pki::Pki, place::said, programs::Programs};
use crate::{
    dist::{ForCluster, oci::Image, tree},
    vm::{apt::empty_directory, image::libraries},
    workspace::find_program,
};

/// A shell, an HTTP server on port 80, clients.
pub(crate) const TEST: &str = "localhost/busybox:test";

pub(crate) const PAGE: &str = "hello";

const APPLETS: [&str; 16] = [
    "cat", "echo", "env", "false", "grep", "httpd", "ip", "nc", "ping", "sh", "sleep", "test", "timeout", "true",
    "wget", "xargs",
];

/// Program of the machine and file of the image, for scripts in Kubernetes' tests. busybox's `nc` has no UDP, and
/// busybox's shell runs its applets without a search of the PATH.
const PROGRAMS: [(&str, &str); 6] = [
    ("curl", "bin/curl"),
    ("dash", "bin/sh"),
    ("dig", "bin/dig"),
    ("getent", "bin/getent"),
    ("nc.openbsd", "bin/nc"),
    ("nslookup", "bin/nslookup"),
];

pub(crate) fn make(programs: &Programs, wharf: &ForCluster, pki: &Pki, work: &Path) -> Result<Vec<PathBuf>> {
    let mut archives = vec![wharf.image.clone()];
    let Some(busybox) = find_program("busybox") else { bail!("make an image: the machine has no busybox-static") };
    let write = |name: &str, names: &[String], root: &Path, config| -> Result<PathBuf> {
        let archive = work.join(format!("{name}.oci.tar"));
        let scratch = work.join(format!("{name}.work"));
        empty_directory(&scratch)?;
        Image { root, names, config }.write(wharf.architecture, wharf.epoch, &scratch, &archive)?;
        fs::remove_dir_all(&scratch).with_context(|| format!("remove {}", scratch.display()))?;
        Ok(archive)
    };
    let root = work.join("busybox");
    empty_directory(&root)?;
    tree::add(&root, "bin/busybox", &read(&busybox)?, 0o755)?;
    for applet in APPLETS {
        tree::link(&root, &format!("bin/{applet}"), "busybox")?;
    }
    tree::add(&root, "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644)?;
    tree::add(&root, "www/index.html", PAGE.as_bytes(), 0o644)?;
    let config = json!({"Cmd": ["/bin/sleep", "2147483647"], "Env": ["PATH=/bin"]});
    archives.push(write("busybox", &[TEST.to_owned(), "localhost/pause:test".to_owned()], &root, config.clone())?);
    if let (Some(agnhost), Some(e2e)) = (programs.optional("agnhost"), programs.optional("e2e.test")) {
        let list = said(Command::new(e2e).arg("--list-images"))?;
        let named = |part: &str| -> Vec<String> {
            list.lines().map(str::trim).filter(|name| name.contains(part)).map(str::to_owned).collect()
        };
        archives.push(write("e2e-pause", &named("/pause:"), &root, config)?);
        tree::add(&root, "agnhost", &read(&agnhost)?, 0o755)?;
        for file in ["localhost.crt", "localhost.key"] {
            tree::add(&root, file, &read(Path::new(&pki.file(file)))?, 0o644)?;
        }
        // dash finds applets by the PATH.
        for applet in said(Command::new(&busybox).arg("--list"))?.lines() {
            let place = format!("bin/{applet}");
            if fs::symlink_metadata(root.join(&place)).is_err() {
                tree::link(&root, &place, "busybox")?;
            }
        }
        for (name, place) in PROGRAMS {
            let Some(program) = find_program(name) else { bail!("make an image: the machine has no {name}") };
            let own = root.join(place);
            if own.is_symlink() {
                fs::remove_file(&own).with_context(|| format!("remove {}", own.display()))?;
            }
            tree::add(&root, place, &read(&program)?, 0o755)?;
            for library in libraries(&program)? {
                tree::add(&root, library.display().to_string().trim_start_matches('/'), &read(&library)?, 0o755)?;
            }
        }
        let config = json!({"Entrypoint": ["/agnhost"], "Cmd": ["pause"], "Env": ["PATH=/bin:/usr/bin"]});
        let names = [named("/agnhost:"), named("/glibc-dns-testing:")].concat();
        archives.push(write("agnhost", &names, &root, config)?);
    }
    Ok(archives)
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("read {}", file.display()))
}
