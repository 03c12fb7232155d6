//! The guest's initramfs: tools, Wharf's programs, tests, libraries.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use super::{
    apt::empty_directory,
    kernel::Kernel,
    plan::{self, TestFile},
    tools::Tools,
};
use crate::{
    build::NEXT_OBJECTS,
    progress::Step,
    workspace::{Workspace, find_program},
};

const INIT: &str = include_str!("init.sh");

/// Only for hung tests.
pub(crate) const TEST_LIMIT_SECONDS: u64 = 600;

const PROGRAMS: &[&str] = &["ip", "tc", "ss", "nft", "iptables-nft-restore"];

/// On Debian.
const IPTABLES_EXTENSIONS: &str = "/usr/lib/x86_64-linux-gnu/xtables";

/// For the rules of `nft_foreign::rules_of_iptables`.
const EXTENSIONS: &[&str] = &[
    "libipt_REJECT.so",
    "libxt_addrtype.so",
    "libxt_comment.so",
    "libxt_conntrack.so",
    "libxt_standard.so",
    "libxt_udp.so",
];

const PRODUCT: &[&str] = &["wharf-agent", "wharf-cni", "wharf"];

/// With crash points.
const ARMED: &[&str] = &["wharf-agent-crash", "wharf-cni-crash", "wharf-crash"];

/// At the host's paths.
const READ_BY_TESTS: &[&str] = &["crates/api/openapi.json", "docs/operations.md"];

const DIRECTORIES: &[&str] =
    &["bin", "dev", "proc", "sys", "tmp", "run", "mnt", "media", "srv", "opt", "etc", "root", "var/lib", "modules"];

struct Tree<'a> {
    root: &'a Path,
    libraries: BTreeSet<PathBuf>,
}

impl Tree<'_> {
    fn place(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    fn directory(&self, path: &Path) -> Result<()> {
        let path = self.place(path);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))
    }

    fn copy(&self, from: &Path, to: &Path) -> Result<()> {
        if let Some(parent) = to.parent() {
            self.directory(parent)?;
        }
        let to = self.place(to);
        fs::copy(from, &to).with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
        Ok(())
    }

    /// Saves memory: the guest keeps all files there.
    fn stripped(&mut self, step: &Step, from: &Path, to: &Path) -> Result<()> {
        self.libraries_of(from)?;
        step.run(Command::new("objcopy").arg("--strip-debug").arg(from).arg(self.place(to)))
    }

    fn write(&self, path: &str, text: &str) -> Result<()> {
        let path = self.place(Path::new(path));
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }

    fn libraries_of(&mut self, program: &Path) -> Result<()> {
        for library in libraries(program)? {
            if self.libraries.insert(library.clone()) {
                self.copy(&library, &library)?;
            }
        }
        Ok(())
    }
}

pub(crate) fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("ask for the libraries of {}: run ldd", program.display()))?;
    parse_libraries(&String::from_utf8_lossy(&output.stdout))
        .with_context(|| format!("ask for the libraries of {}", program.display()))
}

/// Shared by all kernels.
pub(crate) fn make(
    step: &Step,
    workspace: &Workspace,
    tools: &Tools,
    files: &[TestFile],
    work: &Path,
) -> Result<PathBuf> {
    let root = work.join("root");
    empty_directory(&root)?;
    let mut tree = Tree { root: &root, libraries: BTreeSet::new() };
    for directory in DIRECTORIES {
        tree.directory(Path::new(directory))?;
    }
    for directory in ["bin", "bpf", "tests"] {
        tree.directory(&Path::new("/wharf").join(directory))?;
    }
    tree.copy(&tools.busybox_path(), Path::new("/bin/busybox"))?;
    for link in ["bin/sh", "bin/mount", "bin/ln"] {
        symlink("busybox", root.join(link)).with_context(|| format!("link {link} in the guest"))?;
    }
    for name in PROGRAMS {
        let Some(program) = find_program(name) else {
            bail!("copy {name}: this machine has none (iproute2, nftables, iptables)")
        };
        tree.libraries_of(&program)?;
        tree.copy(&program, &Path::new("/bin").join(name))?;
    }
    for name in EXTENSIONS {
        let path = Path::new(IPTABLES_EXTENSIONS).join(name);
        tree.libraries_of(&path)?;
        tree.copy(&path, &path)?;
    }
    for name in PRODUCT {
        let program = workspace.release().join(name);
        if !program.is_file() {
            bail!("copy {name}: {} is not there; leave --prebuilt out once", program.display());
        }
        tree.libraries_of(&program)?;
        tree.copy(&program, &Path::new("/wharf/bin").join(name))?;
        symlink(format!("/wharf/bin/{name}"), root.join("bin").join(name))
            .with_context(|| format!("link {name} in the guest"))?;
    }
    for name in ARMED {
        tree.stripped(step, &workspace.release().join(name), &Path::new("/wharf/bin").join(name))?;
    }
    for object in ["endpoint.o", "node.o", "overlay.o", "sink.o", "endpoint-debug.o"] {
        tree.copy(&workspace.bpf_objects().join(object), &Path::new("/wharf/bpf").join(object))?;
    }
    for object in NEXT_OBJECTS {
        let place = Path::new("/wharf/bpf/next").join(object);
        tree.copy(&workspace.next_bpf_objects().join(object), &place)?;
    }
    // Tests contain their package's path.
    for package in ["tests", "crates/datapath"] {
        tree.directory(&workspace.root().join(package))?;
    }
    for file in READ_BY_TESTS {
        let path = workspace.root().join(file);
        tree.copy(&path, &path)?;
    }
    for file in files {
        tree.stripped(step, &file.path, &Path::new("/wharf/tests").join(&file.name))?;
    }
    tree.write("/wharf/limit", &TEST_LIMIT_SECONDS.to_string())?;
    tree.write("/etc/hostname", "guest\n")?;
    tree.write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")?;
    tree.write("/etc/group", "root:x:0:\nnogroup:x:65534:\n")?;
    tree.write("/init", INIT)?;
    fs::set_permissions(root.join("init"), fs::Permissions::from_mode(0o755)).context("make /init runnable")?;
    let archive = work.join("guest.cpio");
    pack(tools, &root, &archive)?;
    Ok(archive)
}

/// Modules and plan of a kernel, then the shared archive; the kernel unpacks both.
pub(crate) fn complete(tools: &Tools, kernel: &Kernel, plan: &[String], shared: &Path, work: &Path) -> Result<PathBuf> {
    let root = work.join("own");
    let modules = root.join("modules");
    empty_directory(&root)?;
    empty_directory(&modules)?;
    kernel.write_modules(tools, &modules)?;
    let (alone, beside): (Vec<&str>, Vec<&str>) =
        plan.iter().map(String::as_str).partition(|line| plan::is_alone(line));
    for (name, lines) in [("plan", beside), ("alone", alone)] {
        let list = root.join(name);
        let text: String = lines.iter().flat_map(|line| [line, "\n"]).collect();
        fs::write(&list, text).with_context(|| format!("write {}", list.display()))?;
    }
    let archive = work.join("boot.cpio");
    pack(tools, &root, &archive)?;
    let mut whole =
        File::options().append(true).open(&archive).with_context(|| format!("open {}", archive.display()))?;
    let mut common = File::open(shared).with_context(|| format!("open {}", shared.display()))?;
    io::copy(&mut common, &mut whole).with_context(|| format!("write {}", archive.display()))?;
    Ok(archive)
}

fn pack(tools: &Tools, root: &Path, archive: &Path) -> Result<()> {
    let list = Command::new("find")
        .arg(".")
        .current_dir(root)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("list {}: run find", root.display()))?;
    if !list.status.success() {
        bail!("list {}: find failed ({})", root.display(), list.status);
    }
    let names = archive.with_extension("names");
    fs::write(&names, &list.stdout).with_context(|| format!("write {}", names.display()))?;
    let input = File::open(&names).with_context(|| format!("open {}", names.display()))?;
    let output = File::create(archive).with_context(|| format!("create {}", archive.display()))?;
    let packed = tools
        .busybox("cpio")
        .args(["-o", "-H", "newc", "-R", "0:0"])
        .current_dir(root)
        .stdin(input)
        .stdout(output)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .with_context(|| format!("pack {}: run busybox", archive.display()))?;
    if !packed.status.success() {
        let told = String::from_utf8_lossy(&packed.stderr);
        bail!("pack {}: cpio failed ({}): {}", archive.display(), packed.status, told.trim());
    }
    Ok(())
}

/// `libc.so.6 => /lib/x/libc.so.6 (0x...)`, `/lib64/ld-linux-x86-64.so.2 (0x...)`; the vDSO has no path.
fn parse_libraries(output: &str) -> Result<Vec<PathBuf>> {
    let mut libraries = Vec::new();
    for line in output.lines().map(str::trim) {
        if line.ends_with("not found") {
            bail!("a library is missing: {line}");
        }
        let path = line.split_once("=> ").map_or(line, |(_, path)| path).split(" (").next().unwrap_or_default();
        if path.starts_with('/') {
            libraries.push(PathBuf::from(path));
        }
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_and_missing_ones_told() -> Result<()> {
        let told = "\tlinux-vdso.so.1 (0x1)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x2)\n\t/lib64/ld.so.2 (0x3)\n";
        assert_eq!(parse_libraries(told)?, [PathBuf::from("/lib/x/libc.so.6"), PathBuf::from("/lib64/ld.so.2")]);
        assert!(parse_libraries("\tstatically linked\n")?.is_empty());
        assert!(parse_libraries("\tlibz.so => not found\n").is_err());
        Ok(())
    }
}
