//! Endpoints whose addresses another IPAM leased: the agent serves them and keeps its hands off the addresses. And
//! routes of a container's own.

use std::net::IpAddr;

use wharf_agent::{
    endpoint::create::{CreateSpec, External},
    restore,
};
use wharf_api::{ContainerRoute, ErrorCode};
use wharf_core::{
    endpoint::IpOwner,
    ids::PoolName,
    ipam::{Ipam, PoolConfig},
    kernel::{KernelErrorKind as Kind, NatKernel as _, NodeKernel as _},
    nat::{Masquerade, NatEntry},
    overlap::{NodeNetwork, Way},
    plan::DeleteOptions,
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::sync::lock;

use crate::support::*;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

/// A container with addresses of another IPAM, which has a gateway for IPv4.
fn asks(agent: &Agent, name: &str, ips: &[&str]) -> CreateSpec {
    CreateSpec {
        ips: ips.iter().map(|text| ip(text)).collect(),
        external: Some(External::Ipam { plugin: "host-local".to_owned(), gateways: vec![ip("10.1.0.1")] }),
        ..agent.container(name)
    }
}

#[test]
fn the_addresses_are_served_over_restarts_and_never_leased_released_or_rested() {
    let mut machine = Machine::new();
    machine.config.masquerade = Some(Masquerade::default());
    machine.life(async |agent| {
        agent.kernel.ensure_nat(&agent.life.network.spec()).await.expect("table");
        agent.kernel.fail_next(Op::EnsureReachable, Kind::Other);
        let failed = asks(&agent, "c1", &["10.1.0.2", "fd01::2"]);
        agent.try_create(failed.clone()).await.expect_err("asked for");
        agent.assert_nothing_left().await;

        let made = agent.try_create(failed).await.expect("created");
        assert_eq!((made.ipam.as_deref(), made.pool.as_str()), (Some("host-local"), ""));
        assert_eq!((made.ipv4, made.ipv6), ("10.1.0.2".parse().ok(), "fd01::2".parse().ok()));
        // The IPAM's gateway where it has one, else the router.
        assert_eq!((made.gateway4, made.gateway6), ("10.1.0.1".parse().ok(), "fd88::1".parse().ok()));
        assert_eq!(agent.handle(made.id).shared.read(|v| v.record.ip_owner), IpOwner::External);
        assert_eq!(agent.snapshot().await.leases, []);
        let own = [NatEntry::Own(ip("10.1.0.2")), NatEntry::Own(ip("fd01::2"))];
        assert_eq!(agent.kernel.nat(), own.into(), "what other containers send it keeps its source");
        agent.assert_healthy().await;
    });
    machine.life(async |agent| {
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 1);
        let result = agent.del(&attachment("c1", "eth0"), DeleteOptions::default()).await;
        assert_eq!((result.errors, result.leases_released), (vec![], vec![]));
        assert_eq!(agent.resting(), []);
        agent.assert_nothing_left().await;
    });
}

#[test]
fn an_address_that_is_not_the_other_ipams_to_give_is_refused_by_name() {
    Machine::new().life(async |agent| {
        let held = agent.try_create(asks(&agent, "c0", &["10.1.0.9"])).await.expect("created");
        let leased = agent.create("c9").await;
        let lan = Way::OnLink { by_kernel: true, point_to_point: false };
        let network = |net: &str, way, ifname: &str| NodeNetwork {
            net: net.parse().expect("a network"),
            way,
            ifname: Some(ifname.to_owned()),
        };
        agent.kernel.set_networks(vec![
            network("192.0.2.7/32", Way::Address, "eth0"),
            network("192.0.2.0/24", lan, "eth0"),
            network("0.0.0.0/0", Way::Gateway(Some(ip("192.0.2.1"))), "eth0"),
        ]);
        let begun = || agent.operations().into_iter().filter(|op| *op != Op::ObserveNetworksOf).collect::<Vec<_>>();
        let before = begun();
        let of_pool = addresses(&leased)[0].to_string();
        for (address, code, words) in [
            (of_pool.as_str(), ErrorCode::InvalidRequest, "10.88.0.0/24, a pool of the agent"),
            ("10.88.0.1", ErrorCode::InvalidRequest, "10.88.0.0/24"),
            ("10.88.0.200", ErrorCode::InvalidRequest, "10.88.0.0/24"),
            ("192.0.2.7", ErrorCode::InvalidRequest, "the node's address 192.0.2.7 on eth0"),
            ("192.0.2.99", ErrorCode::InvalidRequest, "192.0.2.0/24"),
            ("10.1.0.1", ErrorCode::InvalidRequest, "its own gateway"),
            ("10.1.0.9", ErrorCode::Exists, "has the address 10.1.0.9"),
        ] {
            let refused = agent.try_create(asks(&agent, "c1", &[address])).await.expect_err(address);
            assert!(refused.code == code && refused.message.contains(words), "{address}: {refused:?}");
        }
        assert_eq!(begun(), before, "nothing was begun");
        let handle = agent.handle(held.id);
        agent.delete(&handle).await;
        agent.try_create(asks(&agent, "c1", &["10.1.0.9"])).await.expect("free at once: its rest is the other IPAM's");
        agent.assert_healthy().await;
    });
    Machine::new().with_cidrs(&["10.88.0.0/24"]).life(async |agent| {
        let refused = agent.try_create(asks(&agent, "c1", &["fd01::2"])).await.expect_err("no way for IPv6");
        assert!(refused.message.contains("forwards no IPv6"), "{refused:?}");
    });
}

#[test]
fn masquerading_of_another_ipams_address_is_refused_and_not_pretended() {
    let mut machine = Machine::new();
    let pools = machine.config.pools[0].cidrs.clone();
    machine.config.masquerade = Some(Masquerade { pools, ..Masquerade::default() });
    machine.life(async |agent| {
        let wants = CreateSpec { masquerade: Some(true), ..asks(&agent, "c1", &["10.1.0.2"]) };
        let refused = agent.try_create(wants).await.expect_err("the node does not");
        assert_eq!(refused.code, ErrorCode::InvalidRequest);
        assert!(refused.message.contains("ipMasq") && refused.message.contains("host-local"), "{refused:?}");
        let keeps = CreateSpec { masquerade: Some(false), ..asks(&agent, "c1", &["10.1.0.2"]) };
        agent.try_create(keeps).await.expect("as it is anyway");
    });
}

#[test]
fn pools_that_would_give_out_anothers_address_are_refused_at_the_next_start() {
    Machine::new().life(async |agent| {
        agent.try_create(asks(&agent, "c1", &["10.1.0.2"])).await.expect("created");
        let (dump, snapshot) = (agent.kernel.dump().await.expect("dump"), agent.snapshot().await);
        let fits = |cidrs: &[&str]| {
            let cidrs = cidrs.iter().map(|cidr| cidr.parse().expect("a CIDR")).collect();
            let name = PoolName::parse("default").expect("a name");
            let ipam = Ipam::new(vec![PoolConfig { name: name.clone(), cidrs }], name).expect("pools");
            restore::fits(&snapshot, &dump, &ipam)
        };
        let refused = fits(&["10.1.0.0/16", "fd88::/64"]).expect_err("it has the address").to_string();
        assert!(refused.contains("10.1.0.2") && refused.contains("host-local"), "{refused}");
        fits(&["10.99.0.0/24", "fd99::/64"]).expect("its gateway is no matter of the pools");
        restore::fits(&snapshot, &dump, &lock(&agent.life.network.addresses.ipam)).expect("the pools of before");
    });
}

#[test]
fn an_endpoint_whose_record_was_lost_keeps_its_foreign_address_over_starts() {
    let machine = Machine::new();
    let record = machine.life(async |agent| {
        let made = agent.try_create(asks(&agent, "c1", &["10.1.0.2"])).await.expect("created");
        agent.handle(made.id).shared.read(|v| v.record.clone())
    });
    std::fs::write(machine.store_path(), vec![0xa5; 65_536]).expect("overwrite");
    for round in 0..3 {
        machine.life(async |agent| {
            agent.quiet().await;
            let dump = agent.kernel.dump().await.expect("dump");
            restore::fits(&agent.snapshot().await, &dump, &lock(&agent.life.network.addresses.ipam))
                .expect("no pool was changed");
            assert_eq!(dump.links.len(), 1, "start {round}");
            let refused = agent.try_create(asks(&agent, "c2", &["10.1.0.2"])).await.expect_err("it is in use");
            assert!(refused.code == ErrorCode::Exists && refused.message.contains("wharf explain"), "{refused:?}");
        });
    }
    machine.life(async |agent| {
        agent.quiet().await;
        let gone = agent.del(&record.attachment, DeleteOptions::default()).await;
        assert_eq!((gone.deleted, gone.errors), (vec![record.id.get()], vec![]));
        agent.assert_nothing_left().await;
    });
}

#[test]
fn routes_are_by_the_endpoints_gateway_and_of_its_families() {
    let route = |dst: &str, gw: Option<&str>| ContainerRoute { dst: dst.parse().expect("a network"), gw: gw.map(ip) };
    let machine = Machine::new();
    machine.life(async |agent| {
        let with = |name: &str, routes: &[ContainerRoute]| CreateSpec {
            routes: Some(routes.to_vec()),
            ..agent.container(name)
        };
        let routes = [route("10.2.0.0/16", None), route("fd02::/16", Some("fd88::1"))];
        let made = agent.try_create(with("c1", &routes)).await.expect("created");
        let told = [route("10.2.0.0/16", Some("10.88.0.1")), route("fd02::/16", Some("fd88::1"))];
        assert_eq!(made.routes, Some(told.to_vec()));
        assert_eq!(agent.try_create(with("c2", &[])).await.expect("created").routes, Some(Vec::new()));
        assert_eq!(agent.try_create(agent.container("c3")).await.expect("created").routes, None);
        let refused =
            agent.try_create(with("c4", &[route("10.2.0.0/16", Some("10.88.0.9"))])).await.expect_err("nobody");
        assert!(refused.message.contains("the gateway is 10.88.0.1"), "{refused:?}");
        let external = CreateSpec { routes: Some(routes.to_vec()), ..asks(&agent, "c4", &["10.1.0.2"]) };
        let refused = agent.try_create(external).await.expect_err("no IPv6 address");
        assert!(refused.code == ErrorCode::InvalidRequest && refused.message.contains("fd02::/16"), "{refused:?}");
        agent.assert_healthy().await;
    });
    machine.life(async |agent| {
        let of = |name: &str| {
            let a = attachment(name, "eth0");
            let handle = agent.life.endpoints.registry.by_interface(&a.container_id, &a.ifname).expect("restored");
            handle.shared.read(|v| v.record.routes.clone())
        };
        assert_eq!(["c1", "c2", "c3"].map(|name| of(name).map(|routes| routes.len())), [Some(2), Some(0), None]);
        for name in ["c1", "c2", "c3"] {
            agent.del(&attachment(name, "eth0"), DeleteOptions::default()).await;
        }
        agent.assert_nothing_left().await;
    });
    Machine::new().with_cidrs(&["10.88.0.0/24"]).life(async |agent| {
        let six = CreateSpec { routes: Some(vec![route("fd02::/16", None)]), ..agent.container("c1") };
        let refused = agent.try_create(six).await.expect_err("the pool has no IPv6");
        assert!(refused.code == ErrorCode::InvalidRequest && refused.message.contains("fd02::/16"), "{refused:?}");
        agent.assert_nothing_left().await;
    });
}
