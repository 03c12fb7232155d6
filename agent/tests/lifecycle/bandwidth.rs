//! Limits of bandwidth: in the record, in the kernel, and compared by the audit.

use wharf_agent::endpoint::{build, create::CreateSpec};
use wharf_core::{
    bandwidth::{Bandwidth, Limit},
    finding::EndpointProblem,
    kernel::EndpointKernel as _,
};

use crate::support::*;

#[test]
fn limits_outlive_the_agent_and_are_compared() {
    let machine = Machine::new();
    let bandwidth = Bandwidth { ingress: None, egress: Limit::of(8_000_000, 0).expect("valid") };
    let id = machine.life(async |agent| {
        let spec = CreateSpec { bandwidth, ..agent.container("c1") };
        let made = agent.try_create(spec).await.expect("created");
        assert_eq!(made.bandwidth.egress.map(|l| (l.rate, l.burst)), Some((8_000_000, 2_000_000)));
        assert_eq!(made.bandwidth.ingress, None);
        agent.assert_healthy().await;
        made.id
    });
    machine.life(async |agent| {
        agent.assert_healthy().await;
        let record = agent.handle(id).shared.read(|v| v.record.clone());
        assert_eq!(record.bandwidth, bandwidth);
        let mut config = build::config_of(&agent.life.config, &record, false);
        config.bandwidth = Bandwidth::default();
        agent.kernel.ensure_config(record.id, &config).await.expect("changed behind the agent's back");
        let found = agent.kernel.observe_endpoint(&record).await.expect("observed");
        assert!(matches!(found.as_slice(), [EndpointProblem::Config { field: "limits", .. }]), "{found:?}");
    });
}
