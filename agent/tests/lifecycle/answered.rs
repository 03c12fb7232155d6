//! Deletes that are answered before the kernel has released the links.

use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use wharf_agent::{
    endpoint::{
        collect,
        delete::{self, Answer},
        resume,
    },
    node::endpoint::Handle,
};
use wharf_api::DeleteResult;
use wharf_core::{kernel::KernelErrorKind as Kind, plan::DeleteOptions, state::State};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

async fn unlist(agent: &Agent, handle: &Handle) -> DeleteResult {
    delete::delete(&agent.life, vec![handle.clone()], DeleteOptions::default(), Answer::Unlisted).await
}

#[test]
fn a_delete_is_answered_when_nobody_finds_the_endpoint_and_its_record_goes_after_the_release() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let ip = addresses(&handle)[0];
        let hold = agent.kernel.hold(Op::ReleaseLink);
        let result = unlist(&agent, &handle).await;
        assert_eq!((result.deleted, result.errors), (vec![handle.id.get()], vec![]));
        hold.reached().await;
        assert_eq!(state(&handle), State::Disconnecting);
        let snapshot = agent.snapshot().await;
        assert_eq!((snapshot.endpoints.len(), snapshot.leases.len(), snapshot.intents.len()), (1, 2, 1));
        assert!(agent.lease_owner(ip).is_some() && !agent.is_free(handle.id));

        // The runtime's second DEL needs no wait, and a failed delete's resume leaves this one alone.
        assert_eq!(unlist(&agent, &handle).await, DeleteResult::default());
        assert_eq!(resume::resume(&agent.life).await, Ok(()));

        let life = Arc::clone(&agent.life);
        let settled = tokio::spawn(async move { life.endpoints.registry.settled(|_| true).await });
        let_all_run().await;
        assert!(!settled.is_finished(), "whoever asks for the node's state waits");
        hold.release();
        assert!(settled.await.expect("task"));
        agent.assert_nothing_left().await;
        assert!(!agent.life.endpoints.registry.settled(|_| true).await, "there is nothing to wait for");
    });
}

#[test]
fn a_create_of_the_same_attachment_or_address_waits_for_the_release() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let ip = addresses(&handle)[0];
        let hold = agent.kernel.hold(Op::ReleaseLink);
        assert_eq!(unlist(&agent, &handle).await.errors, []);
        let same = agent.spawn_create(agent.container("c1"));
        let mut wanted = agent.container("c2");
        wanted.ips = vec![ip];
        let address = agent.spawn_create(wanted);
        let other = agent.create("c3").await;
        assert_eq!(state(&other), State::Ready, "others do not wait");
        let_all_run().await;
        assert!(!same.is_finished() && !address.is_finished());
        hold.release();
        let same = same.await.expect("task").expect("the name is free again");
        let address = address.await.expect("task").expect("the address is free again");
        assert_eq!(
            address.ipv4.map(IpAddr::V4).into_iter().chain(address.ipv6.map(IpAddr::V6)).find(|a| *a == ip),
            Some(ip)
        );
        assert_ne!(same.epoch, handle.epoch.0);
    });
}

#[test]
fn a_create_without_a_free_address_waits_for_the_release() {
    Machine::new().with_cidrs(&["10.88.0.0/29", "fd88::/64"]).life(async |agent| {
        let mut living = Vec::new();
        let refused = loop {
            match agent.try_create(agent.container(&format!("c{}", living.len()))).await {
                Ok(endpoint) => living.push(agent.handle(endpoint.id)),
                Err(error) => break error,
            }
        };
        assert!(refused.message.contains("in use"), "{}", refused.message);
        let hold = agent.kernel.hold(Op::ReleaseLink);
        assert_eq!(unlist(&agent, &living[0]).await.errors, []);
        let create = agent.spawn_create(agent.container("next"));
        let_all_run().await;
        assert!(!create.is_finished());
        hold.release();
        create.await.expect("task").expect("an address is free again");
    });
}

#[test]
fn a_release_that_fails_or_hangs_keeps_the_record_and_is_resumed() {
    for hangs in [false, true] {
        Machine::new().life(async |agent| {
            let handle = agent.create("c1").await;
            let hold = hangs.then(|| agent.kernel.hold(Op::ReleaseLink));
            if !hangs {
                agent.kernel.fail_next(Op::ReleaseLink, Kind::Other);
            }
            assert_eq!(unlist(&agent, &handle).await.errors, []);
            if hangs {
                tokio::time::pause();
                tokio::time::sleep(Duration::from_secs(9)).await;
                tokio::time::resume();
            }
            agent.life.endpoints.registry.settled(|_| true).await;
            assert_eq!(state(&handle), State::Disconnecting);
            let snapshot = agent.snapshot().await;
            assert_eq!((snapshot.endpoints.len(), snapshot.leases.len()), (1, 2), "nothing is released");
            drop(hold);
            agent.quiet().await;
            agent.kernel.clear_call_log();
            assert_eq!(resume::resume(&agent.life).await, Ok(()));
            let removed = agent.operations().contains(&Op::RemoveLink);
            assert_eq!(removed, !hangs, "a refused removal is repeated, one that runs is waited for");
            agent.assert_nothing_left().await;
        });
    }
}

#[test]
fn a_collection_and_a_delete_to_the_end_wait_for_the_release() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = agent.kernel.hold(Op::ReleaseLink);
        assert_eq!(unlist(&agent, &handle).await.errors, []);
        let again = agent.spawn_delete(&[&handle], DeleteOptions::default());
        let (life, network) = (Arc::clone(&agent.life), handle.shared.read(|v| v.record.attachment.network.clone()));
        let gc = tokio::spawn(async move { collect::collect(&life, &network, &BTreeSet::new(), None).await });
        let_all_run().await;
        assert!(!again.is_finished() && !gc.is_finished());
        hold.release();
        assert_eq!(gc.await.expect("task"), DeleteResult::default());
        assert_eq!(again.await.expect("task"), DeleteResult::default(), "the first delete has done it");
        agent.assert_nothing_left().await;
        assert_eq!(agent.snapshot().await.intents, [], "and no intent names what is gone");
    });
}
