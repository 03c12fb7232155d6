//! Flows: their collection, and what is asked of them.

use std::{net::IpAddr, time::Duration};

use wharf_agent::{flows, rest::flow};
use wharf_api::{AddressRange, ErrorCode, FlowProtocol, FlowQuery, FlowState};
use wharf_common::FlowState as CoreState;
use wharf_core::{
    flow::{Flow, FlowEnd, FlowFilter, FlowUsage},
    kernel::{FlowKernel as _, KernelErrorKind as Kind},
};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

/// A TCP connection to port 443 of 192.0.2.7.
pub(crate) fn connection(source: IpAddr, port: u16) -> Flow {
    Flow {
        source: FlowEnd { address: source, port },
        destination: FlowEnd { address: [192, 0, 2, 7].into(), port: 443 },
        protocol: 6,
        state: CoreState::Established,
        by_stack: false,
        by_proxy: false,
        kept: true,
        owner: None,
        idle: Duration::from_millis(1_500),
        left: Duration::from_secs(60),
    }
}

/// The ports from which the listed flows began, and how many more there are.
async fn listed(agent: &Agent, query: &FlowQuery) -> (Vec<u16>, u64) {
    let (filter, limit) = flow::to_list(&agent.life.endpoints.registry, query).expect("a query");
    let list = flows::list(&agent.kernel, &filter, limit).await.expect("listed");
    (list.flows.iter().map(|f| f.source.port).collect(), list.more)
}

fn refused<T: std::fmt::Debug>(result: Result<T, wharf_agent::rest::error::Failure>) -> (ErrorCode, String) {
    let answer = result.expect_err("refused").0;
    (answer.code, answer.message)
}

#[test]
fn a_collection_is_kept_and_a_failed_one_leaves_what_was_told() {
    Machine::new().life(async |agent| {
        let (kernel, told) = (&agent.kernel, &agent.node.flows);
        let of = |n| connection([10, 88, 0, 2].into(), n);
        kernel.set_flow_usage(FlowUsage { limit: 10, ..FlowUsage::default() });
        kernel.add_flow(Flow { left: Duration::ZERO, ..of(1) });
        kernel.add_flow(of(2));
        assert_eq!(told.recent(), None);
        flows::collect(kernel, told).await.expect("collected");
        let (first, _) = told.recent().expect("told");
        assert_eq!((first.usage.rows, first.usage.expired, first.usage.limit), (1, 1, 10));
        assert_eq!(kernel.flows(), [of(2)], "the other one is over");
        kernel.fail_next(Op::CollectFlows, Kind::Other);
        flows::collect(kernel, told).await.expect_err("the kernel refused");
        assert_eq!(told.recent(), Some((first, first)));
        kernel.add_flow(of(3));
        flows::collect(kernel, told).await.expect("collected");
        let (last, oldest) = told.recent().expect("told");
        assert_eq!((last.usage.rows, oldest), (2, first));
    });
}

#[test]
fn flows_are_listed_in_order_by_filters_that_must_all_match() {
    Machine::new().life(async |agent| {
        let (a, b) = (agent.create("a").await, agent.create("b").await);
        let ([a4, a6], b4) = (<[_; 2]>::try_from(addresses(&a)).expect("both families"), addresses(&b)[0]);
        let all = [
            connection(b4, 5),
            Flow { destination: FlowEnd { address: a6, port: 80 }, ..connection(a6, 3) },
            Flow { protocol: 17, state: CoreState::New, ..connection(a4, 2) },
            connection(a4, 1),
            // Another endpoint's, to an address of this one.
            Flow { destination: FlowEnd { address: a4, port: 80 }, ..connection(b4, 4) },
        ];
        all.into_iter().for_each(|flow| agent.kernel.add_flow(flow));
        let any = FlowQuery::default();
        let range = |text: &str| Some(text.parse::<AddressRange>().expect("a range"));
        for (query, ports) in [
            (any.clone(), &[1_u16, 2, 4, 5, 3] as &[_]),
            (FlowQuery { endpoint: Some(a.id.to_string()), ..any.clone() }, &[1, 2, 4, 3]),
            (FlowQuery { endpoint: Some("cni-attachment-id:b:eth0".into()), ..any.clone() }, &[4, 5]),
            (FlowQuery { endpoint: Some(a4.to_string()), port: Some(80), ..any.clone() }, &[4, 3]),
            (FlowQuery { address: range("192.0.2.0/24"), ..any.clone() }, &[1, 2, 5]),
            (FlowQuery { address: range(&a6.to_string()), ..any.clone() }, &[3]),
            (FlowQuery { protocol: Some(FlowProtocol(17)), ..any.clone() }, &[2]),
            (FlowQuery { state: Some(FlowState::Established), port: Some(443), ..any.clone() }, &[1, 5]),
            (FlowQuery { state: Some(FlowState::Closed), ..any.clone() }, &[]),
        ] {
            assert_eq!(listed(&agent, &query).await, (ports.to_vec(), 0), "{query:?}");
        }
        let (some, more) = listed(&agent, &FlowQuery { limit: Some(2), ..any.clone() }).await;
        assert_eq!((some.len(), more), (2, 3));
    });
}

#[test]
fn what_is_no_query_is_refused_before_the_kernel_is_asked() {
    Machine::new().life(async |agent| {
        let registry = &agent.life.endpoints.registry;
        let any = FlowQuery::default();
        for query in [
            FlowQuery { limit: Some(0), ..any.clone() },
            FlowQuery { limit: Some(10_001), ..any.clone() },
            FlowQuery { all: Some(true), ..any.clone() },
            FlowQuery { endpoint: Some("a b".into()), ..any.clone() },
        ] {
            let (code, message) = refused(flow::to_list(registry, &query));
            assert_eq!(code, ErrorCode::InvalidRequest, "{query:?}: {message}");
            assert!(message.contains("list flows"), "{message}");
        }
        for query in [
            any.clone(),
            FlowQuery { all: Some(false), ..any.clone() },
            FlowQuery { all: Some(true), port: Some(1), ..any.clone() },
            FlowQuery { limit: Some(1), port: Some(1), ..any.clone() },
        ] {
            let (code, message) = refused(flow::to_remove(registry, &query));
            assert_eq!(code, ErrorCode::InvalidRequest, "{query:?}: {message}");
            assert!(message.contains("remove flows"), "{message}");
        }
        let gone = FlowQuery { endpoint: Some("7".into()), ..any };
        assert_eq!(refused(flow::to_list(registry, &gone)).0, ErrorCode::NotFound);
        assert_eq!(refused(flow::to_remove(registry, &gone)).0, ErrorCode::NotFound);
    });
}

#[test]
fn a_removal_takes_what_matches_and_with_all_everything() {
    Machine::new().life(async |agent| {
        let (a, b) = (agent.create("a").await, agent.create("b").await);
        for (n, handle) in [(1, &a), (2, &a), (3, &b), (4, &b)] {
            agent.kernel.add_flow(connection(addresses(handle)[0], n));
        }
        let remove = async |query: FlowQuery| {
            let filter = flow::to_remove(&agent.life.endpoints.registry, &query).expect("a query");
            agent.kernel.remove_flows(&filter).await.expect("removed")
        };
        let one = FlowQuery { endpoint: Some(a.id.to_string()), port: Some(2), ..FlowQuery::default() };
        assert_eq!((remove(one.clone()).await, remove(one).await), (1, 0));
        assert_eq!(listed(&agent, &FlowQuery::default()).await.0, [1, 3, 4]);
        assert_eq!(remove(FlowQuery { endpoint: Some(b.id.to_string()), ..FlowQuery::default() }).await, 2);
        assert_eq!(remove(FlowQuery { all: Some(true), ..FlowQuery::default() }).await, 1);
        assert_eq!(agent.kernel.flows(), []);
    });
}

/// An endpoint without addresses must not stand for every flow of the node.
#[test]
fn an_endpoint_that_has_no_address_yet_has_no_flows() {
    Machine::new().life(async |agent| {
        agent.disk.hold();
        let created = agent.spawn_create(agent.container("a"));
        eventually("it has a number", || !agent.life.endpoints.registry.list().is_empty()).await;
        let query = FlowQuery { endpoint: Some("1".into()), ..FlowQuery::default() };
        let (code, message) = refused(flow::to_remove(&agent.life.endpoints.registry, &query));
        assert_eq!((code, message.as_str()), (ErrorCode::NotFound, "remove flows: endpoint 1 has no address yet"));
        agent.disk.release();
        let made = created.await.expect("ended").expect("created");
        let filter = flow::to_remove(&agent.life.endpoints.registry, &query).expect("it has addresses now");
        let own = made.ipv4.map(IpAddr::from).into_iter().chain(made.ipv6.map(IpAddr::from)).collect();
        assert_eq!(filter, FlowFilter { addresses: own, ..FlowFilter::default() });
    });
}
