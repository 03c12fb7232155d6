//! The MTU of links: the uplink's, which endpoints follow unless their creator asked for one.

use std::sync::Arc;

use wharf_agent::endpoint::{create::CreateSpec, mtu};
use wharf_core::{kernel::KernelErrorKind as Kind, mtu::Uplink};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

fn uplink(mtu: u32) -> Vec<Uplink> {
    vec![Uplink { ifname: "eth0".into(), mtu }]
}

#[test]
fn endpoints_follow_the_uplink_unless_they_asked_and_their_records_tell() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.kernel.set_uplinks(uplink(1_400));
        mtu::follow(Arc::clone(&agent.life)).await.expect("observed");
        let plain = agent.try_create(agent.container("plain")).await.expect("created");
        let asks = CreateSpec { mtu: Some(1_450), ..agent.container("asks") };
        let fixed = agent.try_create(asks).await.expect("created");
        assert_eq!((plain.mtu, fixed.mtu), (1_400, 1_450));
        agent.kernel.set_uplinks(uplink(1_440));
        agent.kernel.fail_next(Op::EnsureMtu, Kind::Exhausted);
        let why = mtu::follow(Arc::clone(&agent.life)).await.expect_err("the kernel refused");
        assert!(why.contains("1 endpoints keep another MTU than 1440"), "{why}");
        assert_eq!(agent.handle(plain.id).shared.read(|v| v.record.mtu), 1_400);
        mtu::follow(Arc::clone(&agent.life)).await.expect("the next run");
        agent.assert_healthy().await;
    });
    machine.life(async |agent| {
        let mut found: Vec<_> = agent.snapshot().await.endpoints.iter().map(|r| r.mtu).collect();
        found.sort_unstable();
        assert_eq!(found, [1_440, 1_450]);
        agent.assert_healthy().await;
    });
}

#[test]
fn without_an_answer_of_the_kernel_the_mtu_stays() {
    Machine::new().life(async |agent| {
        agent.kernel.set_uplinks(uplink(1_400));
        mtu::observe(&agent.life.network).await.expect("observed");
        agent.kernel.fail_next(Op::ObserveUplinks, Kind::Other);
        mtu::observe(&agent.life.network).await.expect_err("refused");
        assert_eq!(agent.life.network.mtu(), 1_400);
    });
}
