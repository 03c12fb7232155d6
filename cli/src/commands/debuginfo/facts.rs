//! Facts without an agent: kernel settings and file names.

use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use serde::Serialize;

use super::Missing;

const MAX_FILE: u64 = 256 * 1024;
/// Limits of the directory walk.
const MAX_NAMES: usize = 10_000;
const MAX_DEPTH: usize = 4;

const SYSCTLS: [&str; 16] = [
    "kernel/unprivileged_bpf_disabled",
    "net/core/bpf_jit_enable",
    "net/core/bpf_jit_harden",
    "net/core/bpf_jit_limit",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/conf/default/rp_filter",
    "net/ipv4/conf/all/forwarding",
    "net/ipv4/ip_forward",
    "net/ipv6/conf/all/disable_ipv6",
    "net/ipv6/conf/all/forwarding",
    "net/ipv6/conf/default/accept_dad",
    "net/netfilter/nf_conntrack_count",
    "net/netfilter/nf_conntrack_max",
    "net/unix/max_dgram_qlen",
    "user/max_net_namespaces",
    "vm/overcommit_memory",
];

pub(super) fn client() -> BTreeMap<&'static str, String> {
    BTreeMap::from([
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("architecture", std::env::consts::ARCH.to_owned()),
    ])
}

pub(super) fn kernel() -> Vec<(&'static str, Result<Vec<u8>, Missing>)> {
    let text = |path: &str| read(Path::new(path)).map(String::into_bytes);
    vec![
        ("kernel/version.txt", text("/proc/version")),
        ("kernel/osrelease.txt", text("/proc/sys/kernel/osrelease")),
        ("kernel/os-release.txt", text("/etc/os-release")),
        ("kernel/uptime.txt", text("/proc/uptime")),
        ("kernel/load.txt", text("/proc/loadavg")),
        ("kernel/memory.txt", text("/proc/meminfo")),
        ("kernel/bpf-file-systems.txt", bpf_mounts().map(|m| (m.join("\n") + "\n").into_bytes())),
    ]
}

pub(super) fn sysctls() -> BTreeMap<&'static str, String> {
    let value = |name: &&'static str| {
        let read = read(&Path::new("/proc/sys").join(name));
        (*name, read.map_or_else(|why| format!("({why})"), |text| text.trim().to_owned()))
    };
    SYSCTLS.iter().map(value).collect()
}

fn read(path: &Path) -> Result<String, Missing> {
    let fail = |e| Missing::Io("read", path.to_owned(), e);
    let mut bytes = Vec::new();
    fs::File::open(path).map_err(fail)?.take(MAX_FILE).read_to_end(&mut bytes).map_err(fail)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// BPF file systems from proc_pid_mountinfo(5).
fn bpf_mounts() -> Result<Vec<String>, Missing> {
    let all = read(Path::new("/proc/self/mountinfo"))?;
    let is_bpf = |line: &&str| line.split(" - ").nth(1).is_some_and(|after| after.starts_with("bpf "));
    Ok(all.lines().filter(is_bpf).map(str::to_owned).collect())
}

#[derive(Debug, Serialize)]
pub(super) struct Listed {
    /// Path relative to the listed directory.
    name: String,
    /// `file`, `directory`, `socket`, ...
    kind: &'static str,
    bytes: u64,
    /// Octal.
    mode: String,
    owner: (u32, u32),
    /// Modification time, Unix ms.
    changed_unix_ms: u64,
}

/// Does not follow links or open files.
pub(super) fn listing(directory: &Path) -> Result<Vec<Listed>, Missing> {
    let mut found = Vec::new();
    walk(directory, directory, 0, &mut found)?;
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn walk(root: &Path, directory: &Path, depth: usize, found: &mut Vec<Listed>) -> Result<(), Missing> {
    let fail = |e| Missing::Io("list", directory.to_owned(), e);
    for entry in fs::read_dir(directory).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if found.len() >= MAX_NAMES {
            return Ok(());
        }
        // The file was deleted meanwhile.
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        let changed = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        found.push(Listed {
            name: path.strip_prefix(root).unwrap_or(&path).display().to_string(),
            kind: kind(&meta),
            bytes: meta.len(),
            mode: format!("{:o}", meta.mode() & 0o7777),
            owner: (meta.uid(), meta.gid()),
            changed_unix_ms: u64::try_from(changed.as_millis()).unwrap_or(u64::MAX),
        });
        if meta.is_dir() && depth < MAX_DEPTH {
            walk(root, &path, depth + 1, found)?;
        }
    }
    Ok(())
}

fn kind(meta: &fs::Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt as _;
    let kind = meta.file_type();
    match () {
        () if kind.is_dir() => "directory",
        () if kind.is_symlink() => "link",
        () if kind.is_socket() => "socket",
        () if kind.is_file() => "file",
        () => "other",
    }
}

/// Pins below `wharf` on BPF file systems of this mount namespace.
pub(super) fn pins() -> Result<BTreeMap<String, Vec<Listed>>, Missing> {
    let mounts = bpf_mounts()?;
    let points = mounts.iter().filter_map(|line| line.split(' ').nth(4));
    let mut all = BTreeMap::new();
    for point in points {
        let root = PathBuf::from(point).join("wharf");
        if root.is_dir() {
            all.insert(root.display().to_string(), listing(&root)?);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_listed_in_order_and_links_are_not_followed() -> Result<(), Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        fs::write(directory.path().join("b"), b"secret")?;
        fs::create_dir(directory.path().join("a"))?;
        fs::write(directory.path().join("a/c"), b"")?;
        std::os::unix::fs::symlink("/", directory.path().join("z"))?;
        let found = listing(directory.path())?;
        let names: Vec<(&str, &str)> = found.iter().map(|f| (f.name.as_str(), f.kind)).collect();
        assert_eq!(names, [("a", "directory"), ("a/c", "file"), ("b", "file"), ("z", "link")]);
        assert!(!serde_json::to_string(&found)?.contains("secret"));
        assert!(listing(&directory.path().join("none")).is_err());
        Ok(())
    }

    #[test]
    fn every_fact_has_a_place() {
        for (part, content) in kernel() {
            assert!(!part.starts_with('/') && !part.contains(".."), "{part}");
            if part == "kernel/version.txt" {
                assert!(content.is_ok_and(|c| c.starts_with(b"Linux")));
            }
        }
    }
}
