//! Source prefixes: in the record, in the kernel, and refused where others have addresses.

use wharf_agent::{endpoint::create::CreateSpec, node::edit::Edit};
use wharf_api::ErrorCode;
use wharf_core::{
    overlap::{NodeNetwork, Way},
    sources::SourcePrefixes,
};

use crate::{policy_facts::edit, support::*};

fn sources(texts: &[&str]) -> SourcePrefixes {
    let prefixes = texts.iter().map(|text| text.parse().expect("a prefix")).collect();
    SourcePrefixes::new(prefixes).expect("prefixes")
}

fn change(texts: &[&str]) -> Edit {
    Edit { sources: Some(sources(texts)), ..Edit::default() }
}

#[test]
fn prefixes_outlive_the_agent_and_a_change_ends_with_its_build() {
    let machine = Machine::new();
    let id = machine.life(async |agent| {
        let spec = CreateSpec { sources: sources(&["10.200.0.0/16"]), ..agent.container("c1") };
        let made = agent.try_create(spec).await.expect("created");
        assert_eq!(made.source_prefixes.len(), 1);
        agent.assert_healthy().await;
        made.id
    });
    machine.life(async |agent| {
        let handle = agent.handle(id);
        assert_eq!(handle.shared.read(|v| v.record.sources.clone()), sources(&["10.200.0.0/16"]));
        agent.assert_healthy().await;
        let builds = handle.shared.read(|v| v.status.regenerations);
        edit(&handle, change(&["10.201.0.0/16", "fd00:9::/64"])).await.expect("changed");
        assert!(handle.shared.read(|v| v.status.regenerations) > builds, "answered before its build");
        assert_eq!(agent.snapshot().await.endpoints[0].sources, sources(&["10.201.0.0/16", "fd00:9::/64"]));
        agent.assert_healthy().await;
        edit(&handle, change(&[])).await.expect("removed");
        assert!(agent.snapshot().await.endpoints[0].sources.is_empty());
        agent.assert_healthy().await;
    });
}

#[test]
fn prefixes_with_addresses_of_others_are_refused() {
    let mut machine = Machine::new();
    machine.config.service_cidr = vec!["10.96.0.0/12".parse().expect("network")];
    let address = NodeNetwork {
        net: "192.0.2.7/32".parse().expect("network"),
        way: Way::Address,
        ifname: Some("lan0".to_owned()),
    };
    let link = NodeNetwork {
        net: "192.0.2.0/24".parse().expect("network"),
        way: Way::OnLink { by_kernel: true, point_to_point: false },
        ifname: Some("lan0".to_owned()),
    };
    machine.kernel.set_networks(vec![address, link]);
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let cases = [
            ("10.88.0.0/24", "a pool of the agent"),
            ("10.0.0.0/8", "a pool of the agent"),
            ("fd88::9/128", "a pool of the agent"),
            ("10.100.0.0/16", "--service-cidr"),
            ("192.0.2.0/28", "the node's address 192.0.2.7 on lan0"),
        ];
        for (n, (prefix, words)) in cases.into_iter().enumerate() {
            let spec = CreateSpec { sources: sources(&[prefix]), ..agent.container(&format!("x{n}")) };
            let refused = agent.try_create(spec).await.expect_err(prefix);
            assert!(refused.code == ErrorCode::InvalidRequest && refused.message.contains(words), "{refused:?}");
            let refused = edit(&handle, change(&[prefix])).await.expect_err(prefix).to_string();
            assert!(refused.contains(words) && refused.contains("keeps its source prefixes"), "{refused}");
        }
        assert!(handle.shared.read(|v| v.record.sources.is_empty()));
        edit(&handle, change(&["192.0.2.16/28"])).await.expect("hosts of a link");
    });
}
