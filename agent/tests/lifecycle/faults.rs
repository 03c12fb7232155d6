//! A disk and a kernel that refuse, at every step: a code that says "again", and nothing left after the retry.

use std::io::ErrorKind;

use wharf_api::ErrorCode;
use wharf_core::{
    kernel::KernelErrorKind as Kind,
    plan::DeleteOptions,
    state::{Level, State},
};
use wharf_datapath::fake::Operation as Op;

use crate::{create_undone::STEPS as CREATE, support::*};

/// ENOSPC and EIO.
const DISK: [ErrorKind; 2] = [ErrorKind::StorageFull, ErrorKind::Other];
/// EPERM, and EBUSY or ENOMEM.
const KERNEL: [Kind; 2] = [Kind::Permission, Kind::Exhausted];
const DELETE: [Op; 5] = [Op::RemoveAttached, Op::RemoveReachable, Op::RemovePrograms, Op::RemoveLink, Op::ReleaseLink];
const BUILD: [Op; 5] =
    [Op::EnsurePrograms, Op::EnsureConfig, Op::EnsureAttached, Op::EnsureConnected, Op::EnsureReachable];

/// Codes that the shim turns into 11, try again later.
fn is_retriable(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::Kernel
            | ErrorCode::Store
            | ErrorCode::LimitReached
            | ErrorCode::PoolExhausted
            | ErrorCode::Busy
            | ErrorCode::Overloaded
            | ErrorCode::Unavailable
            | ErrorCode::DeadlineExceeded
    )
}

/// What a runtime does after a failed ADD: DEL, then ADD again.
async fn retry(agent: &Agent, name: &str) {
    assert_eq!(agent.del(&attachment(name, "eth0"), DeleteOptions::default()).await.errors, []);
    agent.quiet().await;
    agent.try_create(agent.container(name)).await.expect("the retry succeeds");
    agent.assert_healthy().await;
}

/// As often as it takes to mend what two looks in a row have named.
async fn leak_audit(agent: &Agent) {
    let mut reconcile = wharf_agent::reconcile::Reconcile::default();
    for _ in 0..3 {
        reconcile.run(&agent.life, &agent.node.audit_findings).await.expect("audit");
    }
}

#[test]
fn a_disk_that_refuses_the_intent_or_the_commit_of_a_create() {
    for kind in DISK {
        for at in [Op::ObserveNetns, Op::EnsureReachable] {
            let machine = Machine::new();
            machine.life(async |agent| {
                let hold = agent.kernel.hold(at);
                let create = agent.spawn_create(agent.container("c1"));
                hold.reached().await;
                agent.disk.break_down(kind);
                hold.release();
                let error = create.await.expect("task").expect_err("not durable");
                assert_eq!(error.code, ErrorCode::Store, "{}", error.message);
                assert!(error.hint.is_some() && error.retry_after_ms.is_some(), "{error:?}");
                agent.quiet().await;
                assert!(agent.kernel.is_clean() && agent.life.endpoints.registry.is_empty());
                agent.disk.mend();
                leak_audit(&agent).await; // an intent that the disk did not let it close
                retry(&agent, "c1").await;
            });
            machine.life(async |agent| {
                agent.assert_healthy().await;
                assert_eq!(agent.life.endpoints.registry.len(), 1);
                agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
                agent.assert_nothing_left().await;
            });
        }
    }
}

#[test]
fn a_disk_that_refuses_the_intent_or_the_commit_of_a_delete() {
    for kind in DISK {
        for at in [None, Some(Op::RemoveLink)] {
            let machine = Machine::new();
            machine.life(async |agent| {
                let handle = agent.create("c1").await;
                let hold = at.map(|op| agent.kernel.hold(op));
                if hold.is_none() {
                    agent.disk.break_down(kind);
                }
                let delete = agent.spawn_delete(&[&handle], DeleteOptions::default());
                if let Some(hold) = hold {
                    hold.reached().await;
                    agent.disk.break_down(kind);
                    hold.release();
                }
                let result = delete.await.expect("task");
                assert!(result.deleted.is_empty() && !result.errors.is_empty(), "{result:?}");
                assert_eq!(state(&handle), State::Disconnecting);
                assert!(addresses(&handle).iter().all(|ip| agent.lease_owner(*ip).is_some()), "still held");
                assert!(!agent.is_free(handle.id));
                agent.disk.mend();
                let again = agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
                assert_eq!((again.deleted, again.errors), (vec![handle.id.get()], vec![]));
                agent.assert_nothing_left().await;
            });
            machine.life(async |agent| agent.assert_nothing_left().await);
        }
    }
}

#[test]
fn an_agent_that_dies_over_a_disk_that_refused_a_delete_finishes_it_at_the_next_start() {
    for kind in DISK {
        let machine = Machine::new();
        machine.life(async |agent| {
            let handle = agent.create("c1").await;
            agent.disk.break_down(kind);
            assert!(agent.delete(&handle).await.deleted.is_empty());
        });
        machine.life(async |agent| agent.assert_nothing_left().await);
    }
}

/// The start itself reads and writes; what it cannot write is in force all the same, and the next start finds the same.
#[test]
fn a_disk_that_refuses_what_a_start_wants_to_write() {
    for kind in DISK {
        for at in [Op::Dump, Op::RemoveAttached, Op::RemoveLink] {
            let machine = Machine::new();
            machine.life(async |agent| {
                agent.create("lives").await;
                agent.create("dead").await;
            });
            machine.kernel.remove_netns(&netns_path("dead"));
            machine.start_with(
                at,
                |disk| disk.break_down(kind),
                async |agent| {
                    agent.quiet().await;
                    assert_eq!(state(&agent.handle(1)), State::Ready, "{at:?}");
                    agent.disk.mend();
                    agent.del(&attachment("dead", "eth0"), DeleteOptions::default()).await;
                    agent.assert_healthy().await;
                    assert_eq!(agent.life.endpoints.registry.len(), 1);
                    agent.create("new").await;
                },
            );
            machine.life(async |agent| {
                agent.assert_healthy().await;
                assert_eq!(agent.life.endpoints.registry.len(), 2);
                for name in ["lives", "new"] {
                    agent.del(&attachment(name, "eth0"), DeleteOptions::default()).await;
                }
                agent.assert_nothing_left().await;
            });
        }
    }
}

#[test]
fn a_kernel_that_refuses_a_step_of_a_create() {
    for kind in KERNEL {
        for step in CREATE {
            for after_effect in [false, true] {
                Machine::new().life(async |agent| {
                    if after_effect {
                        agent.kernel.fail_next_after_effect(step, kind);
                    } else {
                        agent.kernel.fail_next(step, kind);
                    }
                    let error = agent.try_create(agent.container("c1")).await.expect_err("asked for");
                    assert!(is_retriable(error.code), "{step:?} {kind:?}: {error:?}");
                    agent.assert_nothing_left().await;
                    retry(&agent, "c1").await;
                });
            }
        }
    }
}

#[test]
fn a_kernel_that_refuses_a_step_of_a_create_and_one_of_its_undo() {
    for kind in KERNEL {
        for undo in DELETE {
            let machine = Machine::new();
            machine.life(async |agent| {
                agent.kernel.fail_next(Op::EnsureReachable, kind);
                agent.kernel.fail_next(undo, kind);
                let error = agent.try_create(agent.container("c1")).await.expect_err("asked for");
                assert!(is_retriable(error.code), "{undo:?} {kind:?}: {error:?}");
                agent.quiet().await;
                // The leak audit takes away what the undo could not, at its second look.
                leak_audit(&agent).await;
                assert!(agent.kernel.is_clean(), "{undo:?} {kind:?}: {:?}", agent.findings(false).await);
                retry(&agent, "c1").await;
            });
            machine.life(async |agent| {
                agent.assert_healthy().await;
                agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
                agent.assert_nothing_left().await;
            });
        }
    }
}

#[test]
fn a_kernel_that_refuses_a_step_of_a_delete() {
    for kind in KERNEL {
        for step in DELETE {
            for after_effect in [false, true] {
                Machine::new().life(async |agent| {
                    let handle = agent.create("c1").await;
                    if after_effect {
                        agent.kernel.fail_next_after_effect(step, kind);
                    } else {
                        agent.kernel.fail_next(step, kind);
                    }
                    let result = agent.delete(&handle).await;
                    assert_eq!(result.errors.len(), 1, "{step:?} {kind:?}: {result:?}");
                    let again = agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
                    assert_eq!(again.errors, [], "{step:?} {kind:?}");
                    agent.assert_nothing_left().await;
                });
            }
        }
    }
}

#[test]
fn a_kernel_that_refuses_a_step_of_a_rebuild() {
    for kind in KERNEL {
        for step in BUILD {
            Machine::new().life(async |agent| {
                let handle = agent.create("c1").await;
                agent.kernel.fail_next(step, kind);
                let answer = agent.request(&handle, Level::Datapath).await;
                let why = answer.await.expect("answered").expect_err("asked for");
                assert!(why.to_string().contains("the last good state stays in force"), "{why}");
                eventually("the retry succeeds", || state(&handle) == State::Ready).await;
                agent.assert_healthy().await;
                agent.delete(&handle).await;
                agent.assert_nothing_left().await;
            });
        }
    }
}

#[test]
fn a_kernel_that_refuses_a_step_of_a_start() {
    for kind in KERNEL {
        for step in BUILD.into_iter().chain(DELETE) {
            let machine = Machine::new();
            let hold = machine.kernel.hold(Op::EnsureConnected);
            machine.life(async |agent| {
                let lives = agent.spawn_create(agent.container("interrupted"));
                hold.reached().await;
                lives.abort();
            });
            hold.release();
            machine.life(async |agent| {
                agent.create("lives").await;
                agent.create("dead").await;
            });
            machine.kernel.remove_netns(&netns_path("dead"));
            machine.kernel.fail_next(step, kind);
            machine.life(async |agent| {
                agent.quiet().await;
                let lives = agent
                    .life
                    .endpoints
                    .registry
                    .by_interface(&attachment("lives", "eth0").container_id, &attachment("lives", "eth0").ifname);
                assert_eq!(state(&lives.expect("it lives")), State::Ready, "{step:?} {kind:?}");
                for name in ["dead", "lives"] {
                    assert_eq!(agent.del(&attachment(name, "eth0"), DeleteOptions::default()).await.errors, []);
                }
                agent.assert_nothing_left().await;
            });
        }
    }
}
