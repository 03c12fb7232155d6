//! Controllers of endpoints: what their rows tell, and that they go with the endpoint.

use wharf_api::ControllerStatus;
use wharf_core::{
    kernel::KernelErrorKind as Kind,
    state::{Level, State},
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

fn rows(agent: &Agent, n: u16) -> Vec<ControllerStatus> {
    agent.life.tasks.controllers.list().into_iter().filter(|c| c.endpoint == Some(n)).collect()
}

#[test]
fn a_failed_build_is_in_the_row_with_its_cause_and_the_next_run() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let n = handle.id.get();
        let hold = agent.kernel.hold(Op::EnsureConfig);
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Exhausted);
        let answer = agent.request(&handle, Level::Policy).await;
        hold.reached().await;
        let running = rows(&agent, n);
        assert!(running.iter().any(|c| c.running_since_unix_ms.is_some()), "the build under way: {running:?}");
        hold.release();
        answer.await.expect("answered").expect_err("the kernel refused");
        eventually("the retry succeeds", || rows(&agent, n).iter().any(|c| c.successes == 1)).await;
        eventually("it is ready", || state(&handle) == State::Ready).await;
        let row = rows(&agent, n).pop().expect("a row");
        assert_eq!((row.failures, row.consecutive_failures, row.running_since_unix_ms), (1, 0, None));
        assert!(row.last_error.is_some() && row.last_failure_unix_ms.is_some() && row.last_duration_ms.is_some());
        assert_eq!(row.next_run_unix_ms, None, "nothing is planned");
        agent.delete(&handle).await;
        assert_eq!(rows(&agent, n), [], "the endpoint is gone");
        let runs = agent.life.tasks.controllers.runs();
        assert_eq!(runs.get(&row.name), Some(&(1, 1)), "the node's counts stay");
    });
}

#[test]
fn a_create_that_fails_leaves_no_row() {
    Machine::new().life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Exhausted);
        agent.try_create(agent.container("c1")).await.expect_err("the kernel refused");
        agent.quiet().await;
        assert!(agent.life.tasks.controllers.list().iter().all(|c| c.endpoint.is_none()));
    });
}
