//! Runs the targets in `fuzz/` with libFuzzer. The build sets cargo-fuzz's coverage flags itself. Sanitizers need an
//! unstable compiler; the targets are safe Rust.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc::{RecvTimeoutError, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    args::{CoreSources, FuzzArgs},
    build, packages,
    privilege::Privilege,
    progress::{Progress, Step},
    rustc::Rustc,
    setup,
    workspace::Workspace,
};

/// Counters and compared values for libFuzzer.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
                        -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing";

/// Also a directory's name.
const PROFILE: &str = "fuzz";

/// For a busy machine.
const INPUT_SECONDS: u32 = 60;

pub(crate) fn run(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    arguments: &FuzzArgs,
) -> Result<ExitCode> {
    let all = targets(workspace)?;
    let chosen = if arguments.targets.is_empty() { all.clone() } else { arguments.targets.clone() };
    if let Some(unknown) = chosen.iter().find(|name| !all.contains(name)) {
        bail!("fuzz {unknown}: no such target; there are {}", all.join(", "));
    }
    if arguments.input.is_some() && chosen.len() != 1 {
        bail!("replay an input: name the one target that it is for");
    }
    // Toolchain, BPF objects (embedded in the agent), build of the targets, run.
    let mut progress = Progress::new(setup::STEPS + 3, verbose, privilege);
    let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::FUZZ, CoreSources::Auto)?;
    build::objects(&mut progress, workspace, &toolchain)?;
    progress.step("Fuzz targets (several minutes the first time)", |step| {
        build_targets(step, workspace, &toolchain.rustc)
    })?;
    let rustc = &toolchain.rustc;
    let failed = match (&arguments.input, chosen.first()) {
        (Some(input), Some(name)) => {
            progress.step(name, |step| replay(step, workspace, rustc, name, input))?;
            0
        }
        _ => {
            let title = format!("{} targets, {} s each", chosen.len(), arguments.seconds);
            progress.step(&title, |step| fuzz_all(step, workspace, rustc, &chosen, arguments.seconds))?
        }
    };
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    let directory = workspace.root().join("fuzz/fuzz_targets");
    let mut names = Vec::new();
    for entry in fs::read_dir(&directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry.with_context(|| format!("list {}", directory.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

/// Separate: other builds have no counters.
fn target_directory(workspace: &Workspace) -> PathBuf {
    workspace.target().join("fuzz")
}

fn build_targets(step: &Step, workspace: &Workspace, rustc: &Rustc) -> Result<()> {
    let mut command = workspace.cargo();
    command
        .args(["build", "--package", "wharf-fuzz", "--features", "libfuzzer", "--bins", "--profile", PROFILE])
        // An explicit target keeps the flags from build scripts and macros.
        .args(["--locked", "--target", &rustc.host])
        .env("CARGO_TARGET_DIR", target_directory(workspace))
        .env("RUSTFLAGS", COVERAGE)
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    step.run(&mut command)
}

fn target(workspace: &Workspace, rustc: &Rustc, name: &str) -> Result<(Command, Scratch)> {
    let scratch = Scratch::make(name)?;
    let program = target_directory(workspace).join(&rustc.host).join(PROFILE).join(name);
    let mut command = Command::new(program);
    command.env("TMPDIR", &scratch.0).env("RUST_BACKTRACE", "1").current_dir(&scratch.0);
    Ok((command, scratch))
}

/// Fuzzes a target on each processor; returns the number of failures.
fn fuzz_all(step: &Step, workspace: &Workspace, rustc: &Rustc, names: &[String], seconds: u32) -> Result<usize> {
    let next = AtomicUsize::new(0);
    let workers = thread::available_parallelism().context("count the processors")?.get().min(names.len());
    // One place for each target, so a send never blocks.
    let (sender, ended) = sync_channel(names.len());
    thread::scope(|scope| {
        for _ in 0..workers {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if sender.send((name, fuzz(workspace, rustc, name, seconds))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let (mut failed, mut last_log) = (0, Instant::now());
        loop {
            match ended.recv_timeout(Duration::from_secs(1)) {
                Ok((name, result)) => {
                    step.clear_line();
                    match result {
                        Ok(runs) => eprintln!("  {name}: {runs}"),
                        Err(error) => {
                            failed += 1;
                            eprintln!("error: {error:#}");
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => step.beat(None, &mut last_log),
                Err(RecvTimeoutError::Disconnected) => return Ok(failed),
            }
        }
    })
}

fn fuzz(workspace: &Workspace, rustc: &Rustc, name: &str, seconds: u32) -> Result<String> {
    let (mut command, _scratch) = target(workspace, rustc, name)?;
    let artifacts = target_directory(workspace).join("artifacts").join(name);
    let found = target_directory(workspace).join("found").join(name);
    for directory in [&artifacts, &found] {
        fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    }
    let fuzz = workspace.root().join("fuzz");
    command
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-timeout={INPUT_SECONDS}"))
        .arg(format!("-dict={}", fuzz.join("words.dict").display()))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg("-print_final_stats=1")
        // libFuzzer writes only to the first directory.
        .args([found, fuzz.join("corpus").join(name)])
        .stdin(Stdio::null());
    let output = command.output().with_context(|| format!("fuzz {name}: start {}", command.get_program().display()))?;
    let told = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let lines: Vec<&str> = told.lines().collect();
        let last = lines.iter().skip(lines.len().saturating_sub(KEPT_LINES)).map(|line| format!("  | {line}\n"));
        bail!(
            "fuzz {name}: it ended with {}:\n{}the input that does it is in {}; `cargo xtask fuzz {name} --input FILE` \
             runs it again, and fuzz/corpus/{name} is its place once it is mended",
            output.status,
            last.collect::<String>(),
            artifacts.display()
        );
    }
    let is_progress = |line: &&str| line.starts_with('#') && line.contains("DONE");
    Ok(told.lines().rfind(is_progress).unwrap_or("done").to_owned())
}

fn replay(step: &Step, workspace: &Workspace, rustc: &Rustc, name: &str, input: &Path) -> Result<()> {
    let input = fs::canonicalize(input).with_context(|| format!("read {}", input.display()))?;
    let (mut command, _scratch) = target(workspace, rustc, name)?;
    step.run(command.arg(input))
}

/// Stack and input of a failure.
const KEPT_LINES: usize = 100;

/// In memory if possible: thousands of files a second.
struct Scratch(PathBuf);

impl Scratch {
    fn make(name: &str) -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let path = parent.join(format!("wharf-fuzz-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                eprintln!("remove {}: {error}", self.0.display());
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_target_has_a_program_and_inputs() -> Result<()> {
        let workspace = Workspace::find()?;
        let manifest = fs::read_to_string(workspace.root().join("fuzz/Cargo.toml"))?;
        let replayed = fs::read_to_string(workspace.root().join("fuzz/tests/corpus.rs"))?;
        let targets = targets(&workspace)?;
        assert!(!targets.is_empty());
        for name in &targets {
            assert!(manifest.contains(&format!("[[bin]]\nname = \"{name}\"\n")), "{name} is not in fuzz/Cargo.toml");
            let corpus = workspace.root().join("fuzz/corpus").join(name);
            assert!(fs::read_dir(&corpus)?.next().is_some(), "{} is empty", corpus.display());
            assert!(replayed.split_whitespace().any(|word| word == name), "{name} is not in fuzz/tests/corpus.rs");
        }
        assert_eq!(manifest.matches("[[bin]]").count(), targets.len());
        Ok(())
    }

    #[test]
    fn a_scratch_directory_goes_with_its_owner() -> Result<()> {
        let scratch = Scratch::make("test")?;
        let path = scratch.0.clone();
        fs::write(path.join("left"), b"")?;
        drop(scratch);
        assert!(!path.exists());
        Ok(())
    }
}
