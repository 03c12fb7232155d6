//! The crash matrix: every operation is killed between every two of its side effects.
//!
//! Which points there are is learned by running each operation with a trace. Then, for each point: the node is brought to
//! the point before the operation, whoever runs it is killed there by SIGKILL, an agent starts, the runtime goes on as
//! runtimes do, and everything must be as if nothing had happened ([`scene::Scene::check`]).

#[path = "../policy/flood.rs"]
mod flood;
mod guard;
mod matrix;
mod operation;
#[path = "../policy/pods.rs"]
#[allow(dead_code, reason = "made for the scenarios of policy, of which the matrix needs less")]
mod pods;
mod redirected;
mod rules;
mod scene;

use anyhow::{Result, ensure};

/// Fewer pairs of operation and point than this: the matrix has shrunk.
const LEAST_PAIRS: usize = 60;

#[test]
fn start_on_an_empty_node() -> Result<()> {
    matrix::starts(&operation::START_EMPTY)
}

#[test]
fn add() -> Result<()> {
    matrix::run(&operation::ADD)
}

#[test]
fn add_without_programs_made_ahead_of_need() -> Result<()> {
    matrix::run(&operation::ADD_UNPREPARED)
}

#[test]
fn add_that_fails_early() -> Result<()> {
    matrix::run(&operation::ADD_FAILS_EARLY)
}

#[test]
fn add_that_fails_late() -> Result<()> {
    matrix::run(&operation::ADD_FAILS_LATE)
}

#[test]
fn del() -> Result<()> {
    matrix::run(&operation::DEL)
}

#[test]
fn regenerate_policy() -> Result<()> {
    matrix::run(&operation::REGENERATE_POLICY)
}

#[test]
fn regenerate_datapath() -> Result<()> {
    matrix::run(&operation::REGENERATE_DATAPATH)
}

#[test]
fn restart_with_a_dead_endpoint_and_an_interrupted_add_first_third() -> Result<()> {
    matrix::run_part(&operation::RESTORE, 0, 3)
}

#[test]
fn restart_with_a_dead_endpoint_and_an_interrupted_add_second_third() -> Result<()> {
    matrix::run_part(&operation::RESTORE, 1, 3)
}

#[test]
fn restart_with_a_dead_endpoint_and_an_interrupted_add_third_third() -> Result<()> {
    matrix::run_part(&operation::RESTORE, 2, 3)
}

#[test]
fn restart_with_an_interrupted_del_first_third() -> Result<()> {
    matrix::run_part(&operation::RESTORE_DEL, 0, 3)
}

#[test]
fn restart_with_an_interrupted_del_second_third() -> Result<()> {
    matrix::run_part(&operation::RESTORE_DEL, 1, 3)
}

#[test]
fn restart_with_an_interrupted_del_third_third() -> Result<()> {
    matrix::run_part(&operation::RESTORE_DEL, 2, 3)
}

#[test]
fn deletion_queue_drained_at_start_first_third() -> Result<()> {
    matrix::run_part(&operation::DRAIN_AT_START, 0, 3)
}

#[test]
fn deletion_queue_drained_at_start_second_third() -> Result<()> {
    matrix::run_part(&operation::DRAIN_AT_START, 1, 3)
}

#[test]
fn deletion_queue_drained_at_start_third_third() -> Result<()> {
    matrix::run_part(&operation::DRAIN_AT_START, 2, 3)
}

#[test]
fn deletion_queue_drained_live() -> Result<()> {
    matrix::run(&operation::DRAIN_LIVE)
}

#[test]
fn plugin_add() -> Result<()> {
    matrix::run(&operation::PLUGIN_ADD)
}

#[test]
fn plugin_del() -> Result<()> {
    matrix::run(&operation::PLUGIN_DEL)
}

#[test]
fn plugin_del_while_no_agent_runs() -> Result<()> {
    matrix::run(&operation::PLUGIN_DEL_ABSENT)
}

#[test]
fn plugin_del_over_a_record_that_is_none() -> Result<()> {
    matrix::run(&operation::PLUGIN_DEL_OVER_RUBBISH)
}

#[test]
fn add_under_policy() -> Result<()> {
    matrix::run(&operation::policy::ADD)
}

#[test]
fn del_under_policy() -> Result<()> {
    matrix::run(&operation::policy::DEL)
}

#[test]
fn policy_import() -> Result<()> {
    matrix::run(&operation::policy::IMPORT)
}

#[test]
fn policy_change() -> Result<()> {
    matrix::run(&operation::policy::CHANGE)
}

#[test]
fn policy_delete() -> Result<()> {
    matrix::run(&operation::policy::DELETE)
}

#[test]
fn policy_labels_of_an_endpoint() -> Result<()> {
    matrix::run(&operation::policy::LABELS)
}

#[test]
fn policy_labels_of_a_namespace() -> Result<()> {
    matrix::run(&operation::policy::NAMESPACE)
}

#[test]
fn policy_restart_after_an_interrupted_import_first_third() -> Result<()> {
    matrix::run_part(&operation::policy::RESTORE, 0, 3)
}

#[test]
fn policy_restart_after_an_interrupted_import_second_third() -> Result<()> {
    matrix::run_part(&operation::policy::RESTORE, 1, 3)
}

#[test]
fn policy_restart_after_an_interrupted_import_third_third() -> Result<()> {
    matrix::run_part(&operation::policy::RESTORE, 2, 3)
}

#[test]
fn redirects_import() -> Result<()> {
    matrix::run(&operation::redirects::IMPORT)
}

#[test]
fn redirects_change() -> Result<()> {
    matrix::run(&operation::redirects::CHANGE)
}

#[test]
fn redirects_delete() -> Result<()> {
    matrix::run(&operation::redirects::DELETE)
}

#[test]
fn redirects_end_of_the_way_to_the_proxy() -> Result<()> {
    matrix::run(&operation::redirects::LEAVE)
}

#[test]
fn redirects_add() -> Result<()> {
    matrix::run(&operation::redirects::ADD)
}

#[test]
fn redirects_del() -> Result<()> {
    matrix::run(&operation::redirects::DEL)
}

#[test]
fn the_matrix_is_as_large_as_it_should_be() -> Result<()> {
    let mut pairs = 0;
    let mut names = std::collections::BTreeSet::new();
    for operation in operation::ALL.into_iter().chain(operation::redirects::ALL) {
        let points = matrix::points(operation)?;
        println!("{:>3} points: {}", points.len(), operation.name);
        pairs += points.len();
        names.extend(points.into_iter().map(|p| p.split(':').next().unwrap_or_default().to_owned()));
    }
    println!("{pairs} pairs of operation and point, {} different points", names.len());
    ensure!(pairs >= LEAST_PAIRS, "only {pairs} pairs of operation and point");
    Ok(())
}
