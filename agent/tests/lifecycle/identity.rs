//! Identities that take time: the endpoint waits in the state waiting-for-identity, for a bounded time; a delete ends
//! the wait.

use std::time::Duration;

use tokio::{sync::oneshot, time::Instant};
use wharf_agent::{
    endpoint::{create::CreateSpec, identity::BOUND},
    node::{
        edit::Edit,
        endpoint::{Command, Handle},
        error::CommandError,
    },
};
use wharf_api::{EndpointState, ErrorCode};
use wharf_core::{identity::Identity, plan::DeleteOptions, state::State};

use crate::support::*;

async fn relabel(handle: &Handle, label: &str) -> oneshot::Receiver<Result<(), CommandError>> {
    let (done, answer) = oneshot::channel();
    let edit = Edit::labels([label.parse().expect("label")].into());
    handle.mailbox.send(Command::Edit(Box::new(edit), done)).await.expect("the endpoint is there");
    answer
}

fn identity(handle: &Handle) -> Identity {
    handle.shared.read(|v| v.record.identity)
}

async fn waits(agent: &Agent) -> Handle {
    let waits = || agent.life.endpoints.registry.list().iter().any(|h| state(h) == State::WaitingForIdentity);
    eventually("an endpoint waits for its identity", waits).await;
    agent.life.endpoints.registry.list().into_iter().find(|h| state(h) == State::WaitingForIdentity).expect("it waits")
}

#[test]
fn a_create_waits_for_its_identity_before_anything_is_made() {
    Machine::new().life(async |agent| {
        agent.identities.hold();
        let create = agent.spawn_create(agent.container("c1"));
        let handle = waits(&agent).await;
        let_all_run().await;
        assert_eq!((state(&handle), identity(&handle)), (State::WaitingForIdentity, Identity::INIT));
        assert_eq!(agent.operations(), [], "nothing is in the kernel");
        agent.identities.release_all();
        let made = create.await.expect("task").expect("created");
        assert_eq!(made.state, EndpointState::Ready);
        assert!(made.identity >= Identity::FIRST_LOCAL.0);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_delete_ends_the_wait_of_a_create_and_no_identity_is_left() {
    Machine::new().life(async |agent| {
        agent.identities.hold();
        let create = agent.spawn_create(agent.container("c1"));
        let handle = waits(&agent).await;
        agent.delete(&handle).await;
        create.await.expect("task").expect_err("deleted");
        agent.identities.release_all();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_caller_that_goes_away_ends_the_wait() {
    Machine::new().life(async |agent| {
        agent.identities.hold();
        let create = agent.spawn_create(agent.container("c1"));
        waits(&agent).await;
        create.abort();
        eventually("the endpoint goes", || agent.life.endpoints.registry.is_empty()).await;
        agent.identities.release_all();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_creates_deadline_ends_the_wait_with_an_error() {
    Machine::new().life(async |agent| {
        agent.identities.hold();
        let deadline = Instant::now() + Duration::from_millis(200);
        let spec = CreateSpec { deadline, ..agent.container("c1") };
        let failed = agent.try_create(spec).await.expect_err("too late");
        assert_eq!(failed.code, ErrorCode::DeadlineExceeded, "{}", failed.message);
        assert!(failed.message.contains("an identity of its labels"), "{}", failed.message);
        agent.identities.release_all();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn new_labels_wait_with_those_of_before_in_force_and_a_delete_wins() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let old = identity(&handle);
        agent.identities.hold();
        let answer = relabel(&handle, "k8s:app=db").await;
        waits(&agent).await;
        assert_eq!(identity(&handle), old);
        let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
        answer.await.expect("answered").expect_err("it goes");
        assert!(delete.await.expect("task").errors.is_empty());
        agent.identities.release_all();
        agent.assert_nothing_left().await;
    });
}

#[test]
fn new_labels_that_get_no_identity_in_time_are_refused_and_the_old_ones_stay() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let before = handle.shared.read(|v| v.record.clone());
        agent.identities.hold();
        let answer = relabel(&handle, "k8s:app=db").await;
        waits(&agent).await;
        let refused = after(BOUND, answer).await.expect("answered").expect_err("too late");
        assert!(matches!(refused, CommandError::NoIdentity(_)), "{refused}");
        eventually("it is ready again", || state(&handle) == State::Ready).await;
        assert_eq!(handle.shared.read(|v| v.record.clone()), before);
        agent.identities.release_all();
        relabel(&handle, "k8s:app=db").await.await.expect("answered").expect("realized");
        assert_ne!(identity(&handle), before.identity);
        assert_eq!(agent.identities.list().len(), 1, "that of before is given back");
        agent.assert_healthy().await;
    });
}
