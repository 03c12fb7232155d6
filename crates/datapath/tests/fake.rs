//! What a test can do to the fake.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use support::*;
use wharf_core::kernel::{Kernel, KernelErrorKind};
use wharf_datapath::{FakeKernel, fake::Operation};

fn run<F: Future<Output = ()>>(test: F) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime").block_on(test);
}

#[test]
fn a_failure_comes_once_before_or_after_the_effect() {
    run(async {
        let k = FakeKernel::new();
        let netns = k.add_netns("/run/netns/c");
        let r = record(1, 10, &netns, "eth0");
        k.fail_next(Operation::EnsureLink, KernelErrorKind::Exhausted);
        let e = k.ensure_link(&link_spec(&r)).await.expect_err("asked for");
        assert_eq!(e.kind, KernelErrorKind::Exhausted);
        assert_eq!(k.dump().await.expect("dump").links, [], "before the effect");
        k.fail_next_after_effect(Operation::EnsureLink, KernelErrorKind::Other);
        k.ensure_link(&link_spec(&r)).await.expect_err("asked for");
        assert_eq!(k.dump().await.expect("dump").links.len(), 1, "after the effect");
        k.ensure_link(&link_spec(&r)).await.expect("the failures are used up");
        assert_eq!(k.calls(Operation::EnsureLink), 3);
        assert_eq!(k.call_log()[0], (Operation::EnsureLink, "endpoint 1".to_owned()));
    });
}

#[test]
fn a_lasting_failure_ends_when_mended() {
    run(async {
        let k = FakeKernel::new();
        k.fail_always(Operation::Dump, KernelErrorKind::Other);
        for _ in 0..3 {
            k.dump().await.expect_err("asked for");
        }
        k.mend(Operation::Dump);
        k.dump().await.expect("mended");
    });
}

#[test]
fn a_held_call_has_no_effect_until_released_and_may_be_given_up() {
    run(async {
        let k = FakeKernel::new();
        let netns = k.add_netns("/run/netns/c");
        let r = record(1, 10, &netns, "eth0");
        let hold = k.hold(Operation::EnsurePrograms);
        let (kernel, spec) = (k.clone(), program_spec(&r));
        let given_up = tokio::spawn(async move { kernel.ensure_programs(&spec).await });
        hold.reached().await;
        given_up.abort();
        assert!(given_up.await.expect_err("aborted").is_cancelled());
        let (kernel, spec) = (k.clone(), program_spec(&r));
        let waits = tokio::spawn(async move { kernel.ensure_programs(&spec).await });
        hold.reached().await;
        assert_eq!(k.dump().await.expect("dump").pins, [], "neither has had an effect");
        hold.release();
        waits.await.expect("task").expect("programs");
        assert_eq!(k.dump().await.expect("dump").pins.len(), 1);
        k.ensure_programs(&program_spec(&r)).await.expect("nothing is held any more");
    });
}

#[test]
fn clones_are_one_kernel() {
    run(async {
        let k = FakeKernel::new();
        let netns = k.add_netns("/run/netns/c");
        let mut r = record(1, 10, &netns, "eth0");
        create(&k, &mut r).await;
        let restarted = k.clone();
        drop(k);
        assert_eq!(restarted.observe_endpoint(&r).await.expect("observe"), []);
        assert!(!restarted.is_clean());
        delete(&restarted, &r).await;
        assert!(restarted.is_clean());
    });
}
