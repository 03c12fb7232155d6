//! `kubernetes`: a cluster in namespaces of this machine, with Wharf's manifest.

mod api;
mod checks;
mod cluster;
mod control;
pub(crate) mod dns;
mod e2e;
mod images;
mod network;
mod node;
mod pki;
mod place;
pub(crate) mod probe;
mod programs;
mod table;

use std::{
    fs::File,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{
    args::{CoreSources, KubernetesArgs},
    build, dist, packages,
    privilege::Privilege,
    progress::{Progress, Step},
    setup,
    workspace::Workspace,
};

use self::{
    checks::Check,
    cluster::{Cluster, Parts},
    place::make_directory,
    programs::Programs,
    table::{Row, Verdict},
};

pub(crate) fn run(
    workspace: &Workspace,
    privilege: &Privilege,
    verbose: bool,
    arguments: &KubernetesArgs,
) -> Result<ExitCode> {
    privilege.confirm("a cluster (it makes namespaces and mounts)")?;
    let directory = Programs::find(&arguments.bin_dir, arguments.e2e)?;
    let checks = checks::all(arguments);
    let building = if arguments.prebuilt { 1 } else { setup::STEPS + build::STEPS };
    let mut progress = Progress::new(building + 4 + checks.len() + usize::from(arguments.e2e), verbose, privilege);
    if arguments.prebuilt {
        build::must_be_there(&workspace.release())?;
        progress.step("Debian packages", |step| packages::ensure(step, privilege, &[packages::KUBERNETES]))?;
    } else {
        let toolchain = setup::ensure(&mut progress, workspace, privilege, packages::KUBERNETES, CoreSources::Auto)?;
        build::ensure(&mut progress, workspace, &toolchain, &[])?;
    }
    let work = make_directory(&workspace.target().join("kubernetes"))?;
    let lock = File::create(work.join(".lock")).with_context(|| format!("lock {}", work.display()))?;
    lock.try_lock().with_context(|| format!("lock {}: does another `cargo xtask kubernetes` run?", work.display()))?;
    let programs =
        progress.step("containerd (40 MB the first time)", |step| Programs::complete(step, directory, &work))?;
    let wharf =
        progress.step("Wharf's image and manifest", |step| dist::for_cluster(step, workspace, &work.join("wharf")))?;
    let parts = Parts { workspace, privilege, programs: &programs, wharf: &wharf, work: &work, e2e: arguments.e2e };
    let churn = Duration::from_secs(arguments.minutes.saturating_mul(60));
    let cluster = progress.step("Cluster", |step| Cluster::start(step, &parts, arguments.nodes, churn))?;
    let (before, after) = checks.split_at(checks.iter().position(|check| check.is_last).unwrap_or(checks.len()));
    let mut rows: Vec<_> = before.iter().map(|check| one(&mut progress, &cluster, check)).collect();
    if let Some(program) = programs.optional("e2e.test").filter(|_| arguments.e2e) {
        let started = Instant::now();
        let run = |_: &Step| e2e::run(&cluster, &program, &arguments.checks);
        rows.extend(progress.step("Kubernetes' tests (an hour)", run).unwrap_or_else(|error| {
            let verdict = Verdict::Failed(format!("{error:#}"));
            vec![Row { check: "e2e".to_owned(), verdict, took: started.elapsed() }]
        }));
    }
    rows.extend(after.iter().map(|check| one(&mut progress, &cluster, check)));
    println!("\n{}", table::render(&rows));
    for row in &rows {
        if let Verdict::Failed(reason) = &row.verdict {
            println!("FAILED {}: {reason}", row.check);
        }
    }
    println!("logs are in {}", cluster.logs.display());
    if arguments.keep {
        println!("\n{}\nCtrl-C ends the cluster", cluster.how_to_enter());
        cluster.wait()?;
    }
    progress.step("Clean-up", |_| cluster.end())?;
    Ok(if rows.iter().any(Row::failed) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Reports a failed check in the table.
fn one(progress: &mut Progress, cluster: &Cluster<'_>, check: &Check) -> Row {
    let started = Instant::now();
    let result = progress.step(check.name, |step| {
        let note = (check.run)(cluster)?;
        step.note(note.clone());
        Ok(note)
    });
    let took: Duration = started.elapsed();
    let verdict = match result {
        Ok(note) => Verdict::Passed(note),
        Err(error) => Verdict::Failed(format!("{error:#}")),
    };
    if let Verdict::Failed(reason) = &verdict {
        eprintln!("{}: {reason}", check.name);
    }
    Row { check: check.name.to_owned(), verdict, took }
}
