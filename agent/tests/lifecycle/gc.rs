//! CNI's GC.

use std::collections::BTreeSet;

use wharf_agent::{
    endpoint::{collect::collect, create::CreateSpec},
    node::endpoint::Handle,
};
use wharf_api::{GcAttachment, KeptEndpoint};
use wharf_core::{
    ids::RuntimeName,
    timeline::{Operation, Outcome},
};

use crate::support::*;

fn is_warned(handle: &Handle) -> bool {
    let warns = |e: &wharf_core::timeline::Entry| {
        (e.operation, e.phase.as_str(), e.outcome) == (Operation::Notice, "gc", Outcome::Warning)
    };
    handle.shared.entries().list().iter().any(warns)
}

#[test]
fn gc_warns_of_endpoints_whose_namespaces_still_exist() {
    Machine::new().life(async |agent| {
        let [kept, ended, living] = [agent.create("c1").await, agent.create("c2").await, agent.create("c3").await];
        agent.kernel.remove_netns(&netns_path("c2"));
        let valid = BTreeSet::from([GcAttachment { container_id: "c1".into(), ifname: "eth0".into() }]);
        let network = attachment("c1", "eth0").network;
        let result = collect(&agent.life, &network, &valid, None).await;
        assert_eq!((result.deleted, result.errors), (vec![ended.id.get(), living.id.get()], vec![]));
        assert_eq!([&kept, &ended, &living].map(is_warned), [false, false, true]);
        agent.delete(&kept).await;
        agent.assert_nothing_left().await;
    });
}

#[test]
fn gc_keeps_what_another_runtime_added_while_its_namespace_exists() {
    Machine::new().life(async |agent| {
        let runtime = |name: &str| RuntimeName::parse(name).expect("a name");
        let create = async |name: &str, by: Option<&str>| {
            let spec = CreateSpec { runtime: by.map(runtime), ..agent.container(name) };
            agent.handle(agent.try_create(spec).await.expect("created").id)
        };
        let [own, ended, unknown] =
            [create("c1", Some("crio")).await, create("c2", Some("podman")).await, create("c3", None).await];
        let living = create("c4", Some("podman")).await;
        let replaced = create("c5", Some("podman")).await;
        agent.kernel.remove_netns(&netns_path("c2"));
        agent.kernel.remove_netns(&netns_path("c5"));
        agent.kernel.add_netns(netns_path("c5"));
        let network = attachment("c1", "eth0").network;
        let result = collect(&agent.life, &network, &BTreeSet::new(), Some(&runtime("crio"))).await;
        let gone = [&own, &ended, &unknown, &replaced].map(|h| h.id.get()).to_vec();
        let kept = KeptEndpoint { endpoint: living.id.get(), runtime: "podman".into() };
        assert_eq!((result.deleted, result.errors, result.kept), (gone, vec![], vec![kept]));
        assert!(!is_warned(&living) && is_warned(&own));

        // Whose list it is is not known: as every list was before.
        let result = collect(&agent.life, &network, &BTreeSet::new(), None).await;
        assert_eq!((result.deleted, result.kept), (vec![living.id.get()], vec![]));
        agent.assert_nothing_left().await;
    });
}
