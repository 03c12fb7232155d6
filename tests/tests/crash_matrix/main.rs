//! The crash matrix: every operation is killed between every two of its side effects.
//!
//! Which points there are is learned by running each operation with a trace. Then, for each point: the node is brought
//! to the point before the operation, whoever runs it is killed there by SIGKILL, an agent starts, the runtime goes on
//! as runtimes do, and everything must be as if nothing had happened ([`scene::Scene::check`]). A run may take a share
//! of the points ([`wharf_tests::crash::share`]).

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

use anyhow::Result;

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
fn shared_pin_made_again() -> Result<()> {
    matrix::run(&operation::REPAIR_PIN)
}

#[test]
fn restart_with_a_dead_endpoint_and_an_interrupted_add() -> Result<()> {
    matrix::run(&operation::RESTORE)
}

#[test]
fn restart_with_an_interrupted_del() -> Result<()> {
    matrix::run(&operation::RESTORE_DEL)
}

#[test]
fn deletion_queue_drained_at_start() -> Result<()> {
    matrix::run(&operation::DRAIN_AT_START)
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
fn policy_restart_after_an_interrupted_import() -> Result<()> {
    matrix::run(&operation::policy::RESTORE)
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
