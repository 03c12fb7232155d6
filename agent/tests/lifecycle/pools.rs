//! Pools of `--pools-from-cluster`: without a row, from a row, refused pod CIDRs, and endpoints from before a change.

use std::fs;

use ipnet::IpNet;
use wharf_agent::{cluster::pools, config::FromCluster, restore};
use wharf_api::ErrorCode;
use wharf_core::{
    ids::PoolName,
    ipam::{Ipam, PoolConfig},
    kernel::NodeKernel as _,
    overlap::{NodeNetwork, Way},
};

use crate::support::*;

/// Without pools, with a cluster file.
fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.config.pools_from_cluster = Some(FromCluster::default());
    machine.config.set_pools(Vec::new());
    machine.config.cluster_file = Some(machine.config.state_dir.join("nodes.toml"));
    machine
}

fn set_row(machine: &Machine, cidrs: &str) {
    let text = format!("[[node]]\nname = 'test'\naddresses = ['192.0.2.1']\npod-cidrs = [{cidrs}]\n");
    fs::write(machine.config.cluster_file.as_ref().expect("a file"), text).expect("written");
}

/// With the pod CIDRs of node `b`.
fn set_rows(machine: &Machine, own: &str, other: &str) {
    let row = |name: &str, n: u8, cidrs: &str| {
        format!("[[node]]\nname = '{name}'\naddresses = ['192.0.2.{n}']\npod-cidrs = [{cidrs}]\n")
    };
    let text = row("test", 1, own) + &row("b", 2, other);
    fs::write(machine.config.cluster_file.as_ref().expect("a file"), text).expect("written");
}

fn net(text: &str) -> IpNet {
    text.parse().expect("network")
}

#[test]
fn without_a_row_creates_wait_and_the_row_restarts_the_agent_with_its_pools() {
    let mut machine = machine();
    set_row(&machine, "");
    machine.life(async |agent| {
        let refused = agent.try_create(agent.container("c1")).await.expect_err("no pools");
        assert_eq!(refused.code, ErrorCode::Unavailable, "{refused:?}");
        assert!(refused.message.contains("this node's row has no pod CIDRs yet"), "{refused:?}");
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        agent.life.follow_row().await.expect("nothing to do");
    });
    set_row(&machine, "'10.99.0.0/24'");
    machine.life(async |agent| {
        let own = agent.life.network.cluster.own_pools().expect("the setting");
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        let address = NodeNetwork { net: net("10.99.0.7/32"), way: Way::Address, ifname: None };
        agent.kernel.set_networks(vec![address]);
        agent.life.follow_row().await.expect("refused");
        let refused = own.view().refused.expect("refused");
        assert!(refused.contains("10.99.0.0/24") && refused.contains("10.99.0.7"), "{refused}");
        assert!(own.missing().is_some_and(|why| why == refused));
    });
    machine.life(async |agent| {
        let own = agent.life.network.cluster.own_pools().expect("the setting");
        agent.kernel.set_networks(Vec::new());
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        agent.life.follow_row().await.expect("a restart");
        own.restarts().await;
    });
    // The row without the file: the pools of the last start.
    fs::remove_file(machine.config.cluster_file.as_ref().expect("a file")).expect("removed");
    pools::resolve(&mut machine.config);
    machine.life(async |agent| {
        let made = agent.create("c1").await;
        assert!(addresses(&made).iter().all(|ip| net("10.99.0.0/24").contains(ip)), "{:?}", addresses(&made));
        agent.delete(&made).await;
    });
}

#[test]
fn the_address_of_an_endpoint_cannot_become_the_router_address() {
    let mut machine = machine();
    machine.config.set_pools(vec![net("10.99.0.0/24")]);
    set_row(&machine, "'10.99.0.0/24'");
    machine.life(async |agent| {
        let made = agent.create("c1").await;
        assert_eq!(addresses(&made), [std::net::IpAddr::from([10, 99, 0, 2])]);
        set_row(&machine, "'10.99.0.2/31'");
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        let outdated = agent.try_create(agent.container("c2")).await.expect_err("the row has other pod CIDRs");
        assert_eq!(outdated.code, ErrorCode::Unavailable, "{outdated:?}");
        agent.life.follow_row().await.expect("refused");
        agent.create("c2").await;
        let refused = agent.life.network.cluster.own_pools().and_then(|own| own.view().refused).expect("refused");
        assert!(refused.contains("router address 10.99.0.2 is leased to"), "{refused}");
    });
}

#[test]
fn no_address_is_leased_while_another_node_has_the_pool() {
    let mut machine = machine();
    machine.config.set_pools(vec![net("10.99.0.0/24")]);
    set_rows(&machine, "'10.99.0.0/24'", "");
    machine.life(async |agent| {
        let made = agent.create("c1").await;
        // Without pod CIDRs, and with others that are refused.
        for own in ["", "'10.98.0.0/32'"] {
            set_rows(&machine, own, "'10.99.0.0/24'");
            agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
            agent.life.follow_row().await.expect("nothing to do");
            let refused = agent.try_create(agent.container("c2")).await.expect_err("its address may be another's");
            assert_eq!(refused.code, ErrorCode::Unavailable, "{refused:?}");
            assert!(refused.message.contains("10.99.0.0/24 of node b"), "{refused:?}");
        }
        assert_eq!(addresses(&made), [std::net::IpAddr::from([10, 99, 0, 2])], "the lease stays");
        set_rows(&machine, "'10.99.0.0/24'", "");
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        agent.create("c2").await;
    });
    // Without the setting, the pools are the operator's, and the status names the overlap.
    machine.config.pools_from_cluster = None;
    set_rows(&machine, "", "'10.99.0.0/24'");
    machine.life(async |agent| drop(agent.create("c3").await));
}

#[test]
fn a_create_that_has_waited_gets_no_address_that_another_node_has_now() {
    let mut machine = machine();
    machine.config.set_pools(vec![net("10.99.0.0/24")]);
    set_rows(&machine, "'10.99.0.0/24'", "");
    machine.life(async |agent| {
        agent.identities.hold();
        let create = agent.spawn_create(agent.container("c1"));
        eventually("the create waits for its identity", || agent.life.endpoints.registry.len() == 1).await;
        set_rows(&machine, "", "'10.99.0.0/24'");
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        agent.identities.release_all();
        let refused = create.await.expect("task").expect_err("its address may be another's");
        assert_eq!(refused.code, ErrorCode::Unavailable, "{refused:?}");
        assert!(refused.message.contains("10.99.0.0/24 of node b"), "{refused:?}");
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_start_has_the_pools_before_while_an_endpoint_has_the_new_router_address() {
    let mut machine = machine();
    let (before, new) = (vec![net("10.88.0.0/24")], vec![net("10.88.0.2/31")]);
    machine.config.set_pools(before.clone());
    set_row(&machine, "'10.88.0.0/24'");
    let config = machine.life(async |agent| {
        agent.create("c1").await;
        let mut config = machine.config.clone();
        config.set_pools(new);
        let (dump, snapshot) = (agent.kernel.dump().await.expect("dump"), agent.snapshot().await);
        let ipam = config.ipam().expect("pools");
        let refused = restore::with_fitting_pools(&snapshot, &dump, config.clone(), ipam.clone());
        let refused = refused.expect_err("no other pools").to_string();
        assert!(refused.contains("10.88.0.2, which is a router address"), "{refused}");
        let from = FromCluster { source: "the row".into(), problem: None, earlier: before.clone() };
        config.pools_from_cluster = Some(from);
        let (config, ipam) = restore::with_fitting_pools(&snapshot, &dump, config, ipam).expect("the pools before");
        assert_eq!((ipam.cidrs(), &config.pools[0].cidrs), (before.clone(), &before));
        config
    });
    machine.config = config;
    set_row(&machine, "'10.88.0.2/31'");
    machine.life(async |agent| {
        let own = agent.life.network.cluster.own_pools().expect("the setting");
        let refused = own.view().refused.expect("refused by the start");
        assert!(refused.contains("10.88.0.2/31 of the row cannot be the pools: endpoint"), "{refused}");
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        agent.life.follow_row().await.expect("refused");
        let refused = own.view().refused.expect("refused by the agent");
        assert!(refused.contains("router address 10.88.0.2 is leased to"), "{refused}");
    });
    set_row(&machine, "'10.99.0.0/24'");
    machine.life(async |agent| {
        agent.life.network.cluster.load("boot", Vec::new()).await.expect("nodes");
        agent.life.follow_row().await.expect("a restart");
        agent.life.network.cluster.own_pools().expect("the setting").restarts().await;
    });
    pools::resolve(&mut machine.config);
    assert_eq!(machine.config.pools[0].cidrs, [net("10.99.0.0/24")]);
    assert_eq!(machine.config.pools_from_cluster.map(|from| from.earlier), Some(before));
}

#[test]
fn endpoints_keep_the_gateway_of_former_pools() {
    Machine::new().life(async |agent| {
        agent.create("c1").await;
        let (dump, snapshot) = (agent.kernel.dump().await.expect("dump"), agent.snapshot().await);
        let ipam = |cidrs: &[&str]| {
            let name = PoolName::parse("default").expect("a name");
            let cidrs = cidrs.iter().copied().map(net).collect();
            Ipam::new(vec![PoolConfig { name: name.clone(), cidrs }], name).expect("pools")
        };
        let mut other = ipam(&["10.99.0.0/24", "fd99::/64"]);
        restore::fits(&snapshot, &dump, &other).expect_err("settings do not change the gateway");
        restore::keep_gateways(&snapshot, &mut other);
        assert_eq!(other.former_routers().len(), 2);
        restore::fits(&snapshot, &dump, &other).expect("the node keeps the gateway");
        let mut own_address = ipam(&["10.88.0.2/31", "fd88::/64"]);
        restore::keep_gateways(&snapshot, &mut own_address);
        let refused = restore::fits(&snapshot, &dump, &own_address).expect_err("an endpoint has it").to_string();
        assert!(refused.contains("10.88.0.2, which is a router address"), "{refused}");
    });
}
