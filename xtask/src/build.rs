//! Builds the BPF objects and the programs that embed them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::{
    progress::{Progress, Step},
    rustc::cargo_target_variable,
    setup::Toolchain,
    workspace::{Workspace, bare_cargo, write_if_changed},
};

pub(crate) const STEPS: usize = 2;

const BPF_TARGET: &str = "bpfel-unknown-none";

pub(crate) const PRODUCT: &[&str] = &["wharf-agent", SHIM, "wharf", "wharf-node", "wharf-kube"];

/// `extra`: binaries of `wharf-tests`.
pub(crate) fn ensure(
    progress: &mut Progress,
    workspace: &Workspace,
    toolchain: &Toolchain,
    extra: &[&str],
) -> Result<()> {
    objects(progress, workspace, toolchain)?;
    programs(progress, workspace, extra)
}

/// Builds `target/bpf/{endpoint,node,overlay,sink,endpoint-debug}.o`, and `{floor,untracked}.o` for the benchmark.
pub(crate) fn objects(progress: &mut Progress, workspace: &Workspace, toolchain: &Toolchain) -> Result<()> {
    progress.step("BPF programs (half a minute the first time)", |step| build_objects(step, workspace, toolchain))
}

pub(crate) fn programs(progress: &mut Progress, workspace: &Workspace, extra: &[&str]) -> Result<()> {
    progress.step("Wharf itself (a few minutes the first time)", |step| build_programs(step, workspace, extra))
}

/// Unoptimised, in half the time; the test build finds most of their dependencies compiled.
pub(crate) fn demo(progress: &mut Progress, workspace: &Workspace) -> Result<()> {
    const PROGRAMS: [&str; 4] = ["wharf-agent", SHIM, "wharf", "wharf-demo"];
    progress.step("Wharf itself (a few minutes the first time)", |step| {
        let mut command = workspace.cargo();
        command.args(["build", "--workspace", "--locked"]).args(PROGRAMS.iter().flat_map(|name| ["--bin", name]));
        step.run(&mut command)?;
        must_be_built(&workspace.debug(), &PROGRAMS)
    })
}

/// Objects of the next ABI version, for upgrade tests.
pub(crate) fn next_objects(progress: &mut Progress, workspace: &Workspace, toolchain: &Toolchain) -> Result<()> {
    progress.step("BPF programs of the next ABI version", |step| {
        let copies = NEXT_OBJECTS.map(|name| (name.trim_end_matches(".o"), name));
        build_object(step, workspace, toolchain, Some("next-abi"), &workspace.next_bpf_objects(), &copies).map(drop)
    })
}

/// Release programs with crash points, and [`next_objects`].
pub(crate) fn crash_programs(progress: &mut Progress, workspace: &Workspace, toolchain: &Toolchain) -> Result<()> {
    next_objects(progress, workspace, toolchain)?;
    progress.step("Programs with crash points", |step| {
        for package in ["wharf-agent", "wharf-cni", "wharf"] {
            let binary = format!("{package}-crash");
            let mut command = workspace.cargo();
            // Cargo unifies the features of packages built together.
            command.args(["build", "--release", "--locked", "--package", package, "--bin", &binary]);
            step.run(&mut command)?;
            if !workspace.release().join(&binary).is_file() {
                bail!("build {binary}: cargo succeeded, yet it is not in {}", workspace.release().display());
            }
        }
        Ok(())
    })
}

/// In [`Workspace::next_bpf_objects`].
pub(crate) const NEXT_OBJECTS: [&str; 3] = ["endpoint.o", "node.o", "sink.o"];

/// Programs and their names in `target/bpf`.
const OBJECTS: [(&str, &str); 6] = [
    ("endpoint", "endpoint.o"),
    ("node", "node.o"),
    ("overlay", "overlay.o"),
    ("sink", "sink.o"),
    ("floor", "floor.o"),
    ("untracked", "untracked.o"),
];

fn build_objects(step: &Step, workspace: &Workspace, toolchain: &Toolchain) -> Result<()> {
    let mut changed = 0;
    // They share most crates, which are compiled once.
    for (features, copies) in
        [(None, OBJECTS.as_slice()), (Some("debug-log"), [("endpoint", "endpoint-debug.o")].as_slice())]
    {
        changed += build_object(step, workspace, toolchain, features, &workspace.bpf_objects(), copies)?;
    }
    step.note(if changed == 0 { "unchanged".to_owned() } else { format!("{changed} objects new") });
    Ok(())
}

fn build_object(
    step: &Step,
    workspace: &Workspace,
    toolchain: &Toolchain,
    features: Option<&str>,
    directory: &Path,
    copies: &[(&str, &str)],
) -> Result<usize> {
    let mut command = bpf_cargo(workspace, toolchain, "build")?;
    command.args(["--release", "--locked"]);
    if let Some(features) = features {
        command.args(["--features", features]);
    }
    step.run(&mut command)?;
    let mut changed = 0;
    for (built, object) in copies {
        let built = bpf_target(workspace).join(BPF_TARGET).join("release").join(built);
        let bytes = fs::read(&built).with_context(|| format!("read the BPF object {}", built.display()))?;
        changed += usize::from(write_if_changed(&directory.join(object), &bytes)?);
    }
    Ok(changed)
}

/// Limits the unstable features and flags to this child.
pub(crate) fn bpf_cargo(workspace: &Workspace, toolchain: &Toolchain, verb: &str) -> Result<Command> {
    // cpu v3 has atomics; --btf keeps types for maps and line info. Unaligned word reads of addresses in packets are
    // allowed on x86-64 and arm64 (CONFIG_HAVE_EFFICIENT_UNALIGNED_ACCESS).
    let flags = format!(
        "--cfg=bpf_target_arch=\"{}\" -Ctarget-cpu=v3 -Cdebuginfo=2 -Clink-arg=--btf \
         -Clink-arg=--cpu-features=+allows-misaligned-mem-access",
        toolchain.rustc.bpf_target_arch()?
    );
    let mut command = bare_cargo();
    command
        .current_dir(workspace.root().join("ebpf"))
        .arg(verb)
        .args(["--target", BPF_TARGET, "-Z", "build-std=core"])
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_DIR", bpf_target(workspace))
        .env(cargo_target_variable(BPF_TARGET, "LINKER"), &toolchain.linker)
        .env(cargo_target_variable(BPF_TARGET, "RUSTFLAGS"), flags)
        // They override the flags above.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("CARGO_BUILD_RUSTFLAGS");
    if toolchain.core_sources != toolchain.rustc.own_library() {
        command.env("__CARGO_TESTS_ONLY_SRC_ROOT", &toolchain.core_sources);
    }
    Ok(command)
}

pub(crate) fn must_be_there(release: &Path) -> Result<()> {
    match PRODUCT.iter().map(|name| release.join(name)).find(|program| !program.is_file()) {
        Some(missing) => bail!(
            "use what is built already: {} is not built; run `cargo xtask build` first, or leave --prebuilt out",
            missing.display()
        ),
        None => Ok(()),
    }
}

fn bpf_target(workspace: &Workspace) -> PathBuf {
    workspace.target().join("ebpf")
}

const SHIM: &str = "wharf-cni";

pub(crate) fn static_libc() -> bool {
    let output = Command::new("cc").arg("-print-file-name=libc.a").output();
    // Otherwise the compiler prints the bare name.
    output.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_absolute())
}

/// Links statically, as in packages.
fn build_programs(step: &Step, workspace: &Workspace, extra: &[&str]) -> Result<()> {
    let is_static = static_libc();
    if !is_static {
        step.note("linked dynamically: libc.a is not installed");
    }
    for package in PRODUCT {
        let mut command = workspace.cargo();
        command.args(["rustc", "--release", "--locked", "--package", package, "--bin", package, "--"]);
        if is_static {
            command.arg("-Ctarget-feature=+crt-static");
        }
        if is_static && *package == SHIM {
            // Self-relocation takes a third of the plugin's run time.
            command.arg("-Crelocation-model=static");
        }
        step.run(&mut command)?;
    }
    if !extra.is_empty() {
        // Separate: product binaries must not depend on `extra`.
        let mut command = workspace.cargo();
        command.args(["build", "--release", "--locked", "--package", "wharf-tests"]);
        for name in extra {
            command.args(["--bin", name]);
        }
        step.run(&mut command)?;
    }
    must_be_built(&workspace.release(), PRODUCT)?;
    must_be_built(&workspace.release(), extra)
}

fn must_be_built(directory: &Path, programs: &[&str]) -> Result<()> {
    for name in programs {
        let binary = directory.join(name);
        if !binary.is_file() {
            bail!(
                "build {name}: cargo succeeded, yet {} is not there; does a `build.target` in your cargo config move it?",
                binary.display()
            );
        }
    }
    Ok(())
}
