//! CNI's GC.

use std::collections::BTreeSet;

use wharf_agent::{endpoint::collect::collect, node::endpoint::Handle};
use wharf_api::GcAttachment;
use wharf_core::timeline::{Operation, Outcome};

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
        let result = collect(&agent.life, &network, &valid).await;
        assert_eq!((result.deleted, result.errors), (vec![ended.id.get(), living.id.get()], vec![]));
        assert_eq!([&kept, &ended, &living].map(is_warned), [false, false, true]);
        agent.delete(&kept).await;
        agent.assert_nothing_left().await;
    });
}
