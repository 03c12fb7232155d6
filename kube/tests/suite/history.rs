//! Random histories of objects and faults: in the end the agent has exactly the rows of the final objects.
//!
//! `WHARF_KUBE_HISTORIES=N` plays N histories, of the seed `WHARF_KUBE_SEED` if it is set. `cargo xtask soak` plays
//! 10,000.

use std::time::Duration;

use proptest::{prelude::*, test_runner::RngSeed};
use serde_json::json;
use tokio::time::sleep;
use wharf_kube::source::Source;

use super::common::{
    Bench, NODE,
    agent::Agent,
    objects::{namespace, node, pod, policy},
    server::{Fault, Server},
    streams::WatchFault,
};

/// After the last fault: silence of 30 s, a delay of at most 30 s, a list within 60 s, the delay of a snapshot of 10 s.
const BOUND: Duration = Duration::from_secs(150);

#[derive(Debug, Clone)]
enum Step {
    Pod(u8, u8, u8),
    EndPod(u8),
    Put(u8, u8),
    Delete(u8, u8),
    Define(bool),
    Fail(u8, Fault),
    Watches(WatchFault),
    Compact,
    Snapshot,
    Advance,
    Restore(u8),
    Shuffle,
    Page(u8),
    EndStream,
    Stall(bool),
    Away(bool),
    Restart,
    Wait(u16),
}

fn fault() -> impl Strategy<Value = Fault> {
    let codes = prop::sample::select(vec![401, 403, 404, 410, 429, 500, 503, 504]);
    prop_oneof![
        4 => (codes, prop::option::of(1_u64..8)).prop_map(|(code, after)| Fault::Status(code, after)),
        1 => Just(Fault::Hang),
        2 => Just(Fault::Reset),
        2 => Just(Fault::Cut),
        1 => Just(Fault::Stall),
        1 => Just(Fault::Garbage),
    ]
}

fn watch_fault() -> impl Strategy<Value = WatchFault> {
    prop::sample::select(vec![
        WatchFault::End,
        WatchFault::Cut,
        WatchFault::Truncate,
        WatchFault::Silence,
        WatchFault::Error(410),
        WatchFault::Error(504),
        WatchFault::Error(500),
        WatchFault::Garbage,
    ])
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => (0_u8..6, 0_u8..3, 0_u8..4).prop_map(|(name, uid, label)| Step::Pod(name, uid, label)),
        2 => (0_u8..6).prop_map(Step::EndPod),
        8 => (0_u8..5, 0_u8..3).prop_map(|(kind, name)| Step::Put(kind, name)),
        8 => (0_u8..6, 0_u8..6).prop_map(|(kind, name)| Step::Delete(kind, name)),
        1 => any::<bool>().prop_map(Step::Define),
        6 => (0_u8..6, fault()).prop_map(|(target, fault)| Step::Fail(target, fault)),
        4 => watch_fault().prop_map(Step::Watches),
        2 => Just(Step::Compact),
        2 => Just(Step::Snapshot),
        1 => Just(Step::Advance),
        1 => any::<u8>().prop_map(Step::Restore),
        1 => Just(Step::Shuffle),
        1 => (1_u8..5).prop_map(Step::Page),
        2 => Just(Step::EndStream),
        1 => any::<bool>().prop_map(Step::Stall),
        1 => any::<bool>().prop_map(Step::Away),
        1 => Just(Step::Restart),
        8 => (1_u16..4_000).prop_map(Step::Wait),
    ]
}

fn other(kind: u8, name: u8, content: u64) -> (Source, serde_json::Value) {
    let name_of = format!("o{name}");
    match kind {
        0 => node(&name_of, &format!("192.0.2.{name}"), &format!("10.{content}.{name}.0/24")),
        1 => namespace(&name_of, &content.to_string()),
        2 => policy(Source::NetworkPolicy, &name_of, &format!("n{name}"), content),
        3 => policy(Source::ClusterNetworkPolicy, &name_of, &format!("k{name}"), content),
        _ => policy(Source::CiliumNetworkPolicy, &name_of, &format!("c{name}"), content),
    }
}

async fn play(steps: Vec<Step>) {
    let server = Server::start();
    server.define(Source::CiliumNetworkPolicy, true);
    let mut bench = Bench::start(server, Agent::start());
    let (mut snapshots, mut content) = (Vec::new(), 0);
    for step in steps {
        let server = &bench.server;
        content += 1;
        match step {
            Step::Pod(name, uid, label) => {
                let address = (label > 0).then(|| format!("10.0.{name}.{uid}"));
                let (name_of, uid) = (format!("p{name}"), format!("u{name}-{uid}"));
                let (source, mut pod) = pod(&name_of, &uid, address.as_deref(), &format!("l{label}"));
                if name % 2 == 0 {
                    pod["spec"]["nodeName"] = json!(NODE);
                }
                server.put((source, pod));
            }
            Step::EndPod(name) => {
                if let Some(mut pod) = server.object(Source::Pod, &format!("shop/p{name}")) {
                    pod["status"]["phase"] = json!("Failed");
                    server.put((Source::Pod, pod));
                }
            }
            Step::Put(kind, name) => {
                let (source, object) = other(kind, name, content % 200);
                // Of the custom resources only this one may be defined.
                if source != Source::ClusterNetworkPolicy {
                    server.put((source, object));
                }
            }
            Step::Delete(kind, name) => match kind {
                0..5 => {
                    let (source, object) = other(kind, name, 0);
                    server.delete(source, &super::common::objects::key(&object));
                }
                _ => server.delete(Source::Pod, &format!("shop/p{name}")),
            },
            Step::Define(is_defined) => server.define(Source::CiliumNetworkPolicy, is_defined),
            Step::Fail(target, fault) => {
                let targets = ["/api/v1/pods", "/networkpolicies", "watch=true", "limit=", "continue=", "/"];
                server.fail(targets.get(usize::from(target)).expect("a target"), fault);
            }
            Step::Watches(fault) => server.break_watches(fault),
            Step::Compact => server.compact(),
            Step::Snapshot => snapshots.push(server.snapshot()),
            Step::Advance => server.advance(100),
            Step::Restore(which) => {
                if !snapshots.is_empty() {
                    let at = usize::from(which) % snapshots.len();
                    // Later snapshots belong to the history that is gone.
                    snapshots.truncate(at + 1);
                    server.break_watches(WatchFault::Cut);
                    server.restore(*snapshots.last().expect("a snapshot"));
                }
            }
            Step::Shuffle => server.shuffle(),
            Step::Page(objects) => server.set_page(usize::from(objects)),
            Step::EndStream => bench.agent.end_stream(),
            Step::Stall(is_stalled) => bench.agent.stall(is_stalled),
            Step::Away(is_away) => bench.agent.away(is_away),
            Step::Restart => bench = bench.restart(),
            Step::Wait(millis) => sleep(Duration::from_millis(millis.into())).await,
        }
    }
    bench.server.heal();
    // Objects of a definition that a restored store does not have.
    bench.server.define(Source::CiliumNetworkPolicy, true);
    bench.agent.away(false);
    bench.agent.stall(false);
    bench.settle(BOUND).await;
    assert_eq!(bench.agent.violations(), Vec::<String>::new());
}

/// Histories of a normal run.
const CASES: u32 = 300;

fn config() -> ProptestConfig {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let cases = number("WHARF_KUBE_HISTORIES").map_or(CASES, |cases| u32::try_from(cases).expect("a number of cases"));
    ProptestConfig {
        cases,
        rng_seed: number("WHARF_KUBE_SEED").map_or(RngSeed::Random, RngSeed::Fixed),
        max_shrink_iters: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_rows_are_those_of_the_final_objects(steps in prop::collection::vec(step(), 1..80)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().expect("a runtime");
        runtime.block_on(play(steps));
    }
}
