//! `vm`: runs kernel tests on Debian's cloud kernels, in QEMU without acceleration: slow, but the same everywhere.

pub(crate) mod apt;
mod guest;
pub(crate) mod image;
mod kernel;
pub(crate) mod plan;
mod table;
mod tools;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::{
    args::{CoreSources, VmArgs, VmKernel},
    build, packages,
    privilege::Privilege,
    progress::Progress,
    setup,
    workspace::Workspace,
};

use self::{
    guest::{Boot, Told},
    kernel::{Kernel, Release},
    plan::TestFile,
    tools::Tools,
};

#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) wanted: Release,
    pub(crate) told: Told,
    /// Tests of the kernel's plan.
    pub(crate) planned: usize,
    pub(crate) seconds: u64,
}

impl Run {
    /// Reasons for a failure, besides failed tests.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let mut complaints = self.told.broken.clone();
        for (name, expected) in [("tcx", self.wanted.tcx), ("netkit", self.wanted.netkit)] {
            let found = self.told.features.get(name).copied();
            if found != Some(expected) {
                let found = found.map_or("nothing", |found| if found { "yes" } else { "no" });
                complaints.push(format!("the agent's probe for {name} found {found} on Linux {}", self.wanted.version));
            }
        }
        if self.told.device_mode != self.wanted.device_mode {
            complaints
                .push(format!("the agent makes {:?} links, not {}", self.told.device_mode, self.wanted.device_mode));
        }
        let ran = self.told.tests.len();
        if ran != self.planned {
            complaints.push(format!("{ran} of {} tests ran", self.planned));
        }
        complaints
    }
}

/// Runs guests in sequence; reports a failed kernel in the table.
pub(crate) fn run(workspace: &Workspace, privilege: &Privilege, verbose: bool, arguments: &VmArgs) -> Result<ExitCode> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("run guests: they are x86-64 and run this machine's builds, which are {}", std::env::consts::ARCH);
    }
    let kernels = if arguments.kernels.is_empty() { VmKernel::DEFAULT.to_vec() } else { unique(&arguments.kernels) };
    let building = if arguments.prebuilt { 0 } else { setup::STEPS + build::STEPS + 2 };
    let mut progress = Progress::new(building + 3 + 2 * kernels.len(), verbose, privilege);
    if arguments.prebuilt {
        build::must_be_there(&workspace.release())?;
    } else {
        let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::VM, CoreSources::Auto)?;
        build::ensure(&mut progress, workspace, &toolchain, &[])?;
        build::crash_programs(&mut progress, workspace, &toolchain)?;
    }
    let files = progress.step("Test binaries", |step| plan::make(step, workspace, &arguments.tests))?;

    let directory = workspace.target().join("vm");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let lock = File::create(directory.join(".lock")).with_context(|| format!("lock {}", directory.display()))?;
    lock.try_lock().with_context(|| format!("lock {}: does another `cargo xtask vm` run?", directory.display()))?;
    let work = directory.join("work");
    let tools = progress.step("QEMU (40 MB the first time)", |step| Tools::ensure(step, &directory))?;
    let shared = progress.step("The guests' files", |step| image::make(step, workspace, &tools, &files, &work))?;
    let places = Places { directory: &directory, work: &work, shared: &shared, files: &files };
    let mut runs = Vec::new();
    let mut failures = Vec::new();
    for kernel in kernels {
        let wanted = kernel::release(kernel);
        match one(&mut progress, &tools, &places, wanted) {
            Ok(run) => runs.push(run),
            Err(error) => {
                eprintln!("error: {error:#}");
                failures.push(format!("Linux {}: {error:#}", wanted.name()));
            }
        }
    }
    if arguments.keep {
        eprintln!("the guests' files are kept in {}", work.display());
    } else {
        fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))?;
    }
    Ok(conclude(&runs, failures, &directory))
}

struct Places<'a> {
    directory: &'a Path,
    work: &'a Path,
    shared: &'a Path,
    files: &'a [TestFile],
}

fn one(progress: &mut Progress, tools: &Tools, places: &Places<'_>, wanted: Release) -> Result<Run> {
    let kernel = progress.step(&format!("Linux {} from Debian", wanted.version), |step| {
        Kernel::ensure(step, places.directory, tools, wanted)
    })?;
    progress.step(&format!("Tests on Linux {}", wanted.name()), |step| {
        let plan = plan::lines(places.files, wanted.whole);
        let archive = image::complete(tools, &kernel, &plan, places.shared, places.work)?;
        let started = Instant::now();
        let [console, log] = logs(places.directory, wanted);
        let (planned, archive) = (plan.len(), archive.as_path());
        let boot =
            Boot { kernel: &kernel, device_mode: wanted.device_mode, archive, console: &console, log: &log, planned };
        let told = guest::run(step, tools, &boot)?;
        step.note(table::summary(&told));
        Ok(Run { wanted, told, planned, seconds: started.elapsed().as_secs() })
    })
}

fn logs(directory: &Path, wanted: Release) -> [PathBuf; 2] {
    ["console", "tests"].map(|what| directory.join(format!("{}-{what}.log", wanted.name())))
}

fn conclude(runs: &[Run], mut failures: Vec<String>, directory: &Path) -> ExitCode {
    println!("\n{}", table::render(runs));
    for (name, why) in plan::LEFT_OUT.iter().chain(plan::TOO_FAST) {
        println!("left out: {name}, which {why}");
    }
    for run in runs {
        let without = run.told.tests.iter().filter(|test| test.verdict == guest::Verdict::NoTcx);
        for test in without {
            println!("not applicable on Linux {}: {}, which needs tcx", run.wanted.name(), test.name);
        }
    }
    println!("the guests' logs are in {}", directory.display());
    for run in runs {
        let failed = run.told.tests.iter().filter(|test| test.verdict == guest::Verdict::Failed);
        failures.extend(failed.map(|test| format!("Linux {}: {}", run.wanted.name(), test.name)));
        let complaints = run.complaints().into_iter();
        failures.extend(complaints.map(|complaint| format!("Linux {}: {complaint}", run.wanted.name())));
    }
    for failure in &failures {
        println!("FAILED {failure}");
    }
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn unique(kernels: &[VmKernel]) -> Vec<VmKernel> {
    let mut found = Vec::new();
    for kernel in kernels {
        if !found.contains(kernel) {
            found.push(*kernel);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_with(lines: &[&str], planned: usize) -> Run {
        let mut told = Told::default();
        for line in lines {
            told.on_line(line);
        }
        Run { wanted: kernel::release(VmKernel::V6_12), told, planned, seconds: 1 }
    }

    #[test]
    fn a_run_is_good_only_when_it_is_whole_and_the_probe_found_what_is_there() {
        let good = r#"@status {"kernel":{"features":{"tcx":true,"netkit":true}},"network":{"device_mode":"veth"}}"#;
        assert_eq!(run_with(&[good, "@start a b", "@end a b 0 1"], 1).complaints(), Vec::<String>::new());
        assert_eq!(run_with(&[good], 1).complaints(), ["0 of 1 tests ran"]);
        let blind = good.replace("\"tcx\":true", "\"tcx\":false");
        assert_eq!(run_with(&[&blind], 0).complaints(), ["the agent's probe for tcx found no on Linux 6.12"]);
        let other = good.replace("\"veth\"", "\"netkit\"");
        assert_eq!(run_with(&[&other], 0).complaints(), ["the agent makes \"netkit\" links, not veth"]);
        assert_eq!(run_with(&[], 0).complaints().len(), 3);
    }

    #[test]
    fn a_kernel_named_twice_runs_once() {
        use VmKernel::{V6_1, V7_2};
        assert_eq!(unique(&[V7_2, V6_1, V7_2]), [V7_2, V6_1]);
    }
}
