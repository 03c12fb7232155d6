//! Addresses that were given back are not given out again while anything may speak for their old owner.

use std::{net::IpAddr, time::Duration};

use wharf_agent::addresses::resting;
use wharf_api::ErrorCode;
use wharf_core::{
    kernel::{EndpointKernel as _, KernelErrorKind as Kind},
    store::LeaseOwner,
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

/// Longer than any test.
const HOUR: u64 = 3_600_000;

/// A machine with two IPv4 addresses for endpoints, and rests that do not end by themselves.
fn small() -> Machine {
    let mut machine = Machine::new().with_cidrs(&["10.88.0.0/29", "fd88::/64"]);
    machine.config.ip_rest_ms = HOUR;
    machine
}

/// Takes addresses until `n` IPv4 addresses are left.
async fn leave(agent: &Agent, n: usize) {
    for taken in 0..5 - n {
        agent.lease_to_caller(&format!("job {taken}")).await;
    }
}

fn v4(agent: &Agent, id: u16) -> IpAddr {
    addresses(&agent.handle(id))[0]
}

/// As if all rests were over.
async fn time_passes(agent: &Agent) {
    lock(&agent.life.network.addresses.ipam).set_rest(0);
    resting::wake(&agent.life.network.addresses).await.expect("checked");
    lock(&agent.life.network.addresses.ipam).set_rest(HOUR);
}

#[test]
fn a_released_address_rests_while_others_are_free() {
    let machine = small();
    machine.life(async |agent| {
        let first = agent.create("c1").await;
        let ip = v4(&agent, 1);
        agent.delete(&first).await;
        resting::wake(&agent.life.network.addresses).await.expect("checked");
        assert_eq!(agent.resting().iter().map(|(ip, _)| *ip).collect::<Vec<_>>(), addresses(&first));
        for n in 2..6 {
            let other = agent.create(&format!("c{n}")).await;
            assert_ne!(addresses(&other)[0], ip);
        }
        assert_eq!(agent.snapshot().await.resting.len(), 2);
        agent.assert_healthy().await;
    });
}

#[test]
fn when_no_other_is_free_the_rest_is_cut_short() {
    let machine = small();
    machine.life(async |agent| {
        leave(&agent, 1).await;
        let first = agent.create("c1").await;
        let ip = v4(&agent, 1);
        agent.delete(&first).await;
        agent.kernel.clear_call_log();
        let second = agent.create("c2").await;
        assert_eq!(addresses(&second)[0], ip);
        assert!(agent.kernel.calls(Op::ObserveSpeakers) > 0, "not unchecked");
        assert!(agent.kernel.calls(Op::RemoveConnections) > 0, "nor with the connections of the one before");
        agent.assert_healthy().await;
    });
}

#[test]
fn the_checks_are_never_cut_short() {
    let machine = small();
    machine.life(async |agent| {
        leave(&agent, 1).await;
        let first = agent.create("c1").await;
        let ip = v4(&agent, 1);
        agent.delete(&first).await;
        agent.proxy.listens(ip);
        let error = agent.try_create(agent.container("c2")).await.expect_err("the proxy listens on it");
        assert_eq!(error.code, ErrorCode::PoolExhausted);
        assert!(error.message.contains("listener"), "it says what is in the way: {}", error.message);
        assert!(agent.resting().iter().any(|(of, why)| *of == ip && why.is_some()));
        agent.quiet().await;
        agent.proxy.closes(ip);
        let second = agent.create("c2").await;
        assert_eq!(addresses(&second)[0], ip);
        agent.assert_healthy().await;
    });
}

#[test]
fn an_address_is_not_woken_while_a_row_of_the_kernel_speaks_for_it() {
    let machine = small();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let record = handle.shared.read(|v| v.record.clone());
        let ip = v4(&agent, 1);
        agent.delete(&handle).await;
        agent.quiet().await;
        // A row came back behind the agent's back: what it would send goes to whoever gets the address.
        agent.kernel.add_netns(netns_path("c1"));
        let spec = wharf_core::kernel::ProgramSpec {
            id: record.id,
            container_mac: record.container_mac,
            host_mac: record.host_mac,
            debug: false,
            keep: false,
        };
        agent.kernel.ensure_programs(&spec).await.expect("loaded");
        agent.kernel.ensure_reachable(&record).await.expect("rows");
        time_passes(&agent).await;
        assert!(agent.resting().iter().any(|(of, why)| *of == ip && why.is_some()), "{:?}", agent.resting());
        leave(&agent, 1).await;
        agent.try_create(agent.container("c2")).await.expect_err("its row is there");
        agent.quiet().await;
        agent.kernel.remove_reachable(&record).await.expect("rows gone");
        agent.kernel.remove_programs(record.id).await.expect("unpinned");
        time_passes(&agent).await;
        assert_eq!(agent.resting(), []);
        agent.create("c2").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn a_kernel_that_cannot_be_asked_wakes_nothing() {
    for op in [Op::ObserveSpeakers, Op::RemoveConnections] {
        for kind in [Kind::Permission, Kind::Exhausted] {
            let machine = small();
            machine.life(async |agent| {
                leave(&agent, 1).await;
                let first = agent.create("c1").await;
                agent.delete(&first).await;
                agent.kernel.fail_always(op, kind);
                let error = agent.try_create(agent.container("c2")).await.expect_err("nobody knows who speaks");
                assert_eq!(error.code, ErrorCode::PoolExhausted, "{op:?}");
                agent.quiet().await;
                lock(&agent.life.network.addresses.ipam).set_rest(0);
                resting::wake(&agent.life.network.addresses).await.expect_err("it is told");
                assert_eq!(agent.resting().len(), 2, "{op:?}");
                agent.kernel.mend(op);
                agent.create("c2").await;
                agent.assert_healthy().await;
            });
        }
    }
}

#[test]
fn a_rest_outlives_the_agent_and_ends_in_the_store_too() {
    let machine = small();
    let rested = machine.life(async |agent| {
        let handle = agent.create("c1").await;
        agent.delete(&handle).await;
        addresses(&handle)
    });
    machine.life(async |agent| {
        assert_eq!(agent.resting().iter().map(|(ip, _)| *ip).collect::<Vec<_>>(), rested);
        assert!(!addresses(&agent.create("c2").await).contains(&rested[0]));
        time_passes(&agent).await;
        assert_eq!((agent.resting(), agent.snapshot().await.resting), (vec![], vec![]));
    });
    machine.life(async |agent| assert_eq!(agent.resting(), []));
}

#[test]
fn an_address_that_was_woken_early_does_not_rest_again_at_the_next_start() {
    let machine = small();
    let ip = machine.life(async |agent| {
        leave(&agent, 1).await;
        let first = agent.create("c1").await;
        agent.delete(&first).await;
        let second = agent.create("c2").await;
        assert!(
            agent.snapshot().await.resting.iter().all(|r| r.ip != addresses(&second)[0]),
            "with the lease's commit"
        );
        addresses(&second)[0]
    });
    machine.life(async |agent| {
        assert!(agent.lease_owner(ip).is_some());
        assert!(agent.resting().iter().all(|(of, _)| *of != ip));
        agent.assert_healthy().await;
    });
}

#[test]
fn an_address_that_is_asked_for_by_name_returns_to_the_one_who_had_it_unless_something_speaks_for_it() {
    let machine = small();
    machine.life(async |agent| {
        let first = agent.create("c1").await;
        let ip = v4(&agent, 1);
        agent.delete(&first).await;
        agent.proxy.listens(ip);
        let mut spec = agent.container("c1");
        spec.ips = vec![ip];
        agent.try_create(spec.clone()).await.expect_err("the proxy listens on it");
        agent.quiet().await;
        agent.proxy.closes(ip);
        let again = agent.try_create(spec).await.expect("created");
        assert_eq!(again.ipv4.map(IpAddr::V4), Some(ip));
        agent.assert_healthy().await;
    });
}

#[test]
fn an_address_that_is_asked_for_by_name_rests_for_everybody_else() {
    let machine = small();
    machine.life(async |agent| {
        let first = agent.create("c1").await;
        let ip = v4(&agent, 1);
        agent.delete(&first).await;
        let mut spec = agent.container("c2");
        spec.ips = vec![ip];
        let error = agent.try_create(spec).await.expect_err("it rests");
        assert_eq!(error.code, ErrorCode::Busy, "{}", error.message);
        assert!(error.retry_after_ms.is_some(), "a retry mends it");
        agent.assert_healthy().await;
    });
}

#[test]
fn of_addresses_that_rest_the_one_released_last_is_used_last() {
    let machine = small();
    machine.life(async |agent| {
        leave(&agent, 3).await;
        let names = ["c1", "c2", "c3"];
        for name in names {
            agent.create(name).await;
        }
        let mut order = Vec::new();
        for n in [2, 3, 1] {
            order.push(v4(&agent, n));
            agent.delete(&agent.handle(n)).await;
        }
        let mut given = Vec::new();
        for name in names {
            agent.kernel.remove_netns(&netns_path(name));
            given.push(addresses(&agent.create(name).await)[0]);
        }
        assert_eq!(given, order);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_lease_that_a_failed_create_took_rests_as_well() {
    let machine = small();
    machine.life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.try_create(agent.container("c1")).await.expect_err("asked for");
        agent.quiet().await;
        assert_eq!(agent.resting().len(), 2, "its programs were attached");
        let held = lock(&agent.life.network.addresses.ipam).owned_by(|o| *o != LeaseOwner::Node);
        assert_eq!(held, []);
        agent.assert_healthy().await;
    });
}

#[test]
fn the_addresses_of_a_failed_create_rest_until_the_proxy_has_let_go_and_over_a_restart_too() {
    let mut machine = small();
    machine.config.proxy_timeout = Duration::from_millis(20);
    let rests = machine.life(async |agent| {
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        agent.proxy.never_answers(id(1), "stuck");
        agent.try_create(agent.container("c1")).await.expect_err("asked for");
        agent.quiet().await;
        let rests: Vec<_> = agent.resting().into_iter().map(|(ip, _)| ip).collect();
        assert_eq!(rests.len(), 2);
        rests.iter().for_each(|ip| agent.proxy.listens(*ip));
        rests
    });
    machine.life(async |agent| {
        time_passes(&agent).await;
        assert!(agent.resting().iter().all(|(_, why)| why.is_some()), "{:?}", agent.resting());
        assert_eq!(agent.resting().len(), 2);
        rests.iter().for_each(|ip| agent.proxy.closes(*ip));
        time_passes(&agent).await;
        assert_eq!((agent.resting(), agent.snapshot().await.resting), (vec![], vec![]));
    });
}

#[test]
fn an_address_that_a_caller_gives_back_rests_as_well() {
    let machine = small();
    machine.life(async |agent| {
        let lease = agent.lease_to_caller("job 7").await;
        agent.disk.fill();
        resting::release(&agent.life.network.addresses, std::slice::from_ref(&lease), Vec::new())
            .await
            .expect_err("not durable");
        assert_eq!(agent.lease_owner(lease.ip), Some(lease.owner.clone()), "so it is still the caller's");
        agent.disk.mend();
        resting::release(&agent.life.network.addresses, std::slice::from_ref(&lease), Vec::new())
            .await
            .expect("released");
        assert_eq!((agent.lease_owner(lease.ip), agent.resting()), (None, vec![(lease.ip, None)]));
    });
    machine.life(async |agent| {
        assert_eq!(agent.resting().len(), 1);
        time_passes(&agent).await;
        agent.assert_nothing_left().await;
    });
}
