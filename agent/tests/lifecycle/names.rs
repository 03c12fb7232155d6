//! Addresses of names: rows follow what DNS answers, and what connections use stays.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use wharf_agent::policy::error::PolicyError;
use wharf_core::{
    flow::FlowFilter,
    kernel::{FlowKernel as _, KernelErrorKind as Kind},
};
use wharf_datapath::fake::Operation as Op;
use wharf_dns::{Answer, Member};
use wharf_kit::clock;

use crate::{flows::connection, policy::rows, support::*};

const TTL: Duration = Duration::from_secs(60);
/// A time, milliseconds.
const NOW: u64 = 1_700_000_000_000;
const LATER: u64 = NOW + 3_600_000;

/// Endpoints reach what is below `test` by name, and nothing else.
const RULES: &str = "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {name: names}\nspec:\n  \
                     endpointSelector: {}\n  egress:\n  - toFQDNs: [{matchPattern: '*.test'}]\n";

fn answer(name: &str, addresses: &[&str]) -> Answer {
    let addresses = addresses.iter().map(|address| (address.parse().expect("address"), TTL)).collect();
    Answer { member: Member { id: 1, epoch: 1 }, name: name.to_owned(), addresses }
}

/// Addresses of the world that have rows of their own.
fn known(machine: &Machine) -> BTreeSet<IpAddr> {
    let hosts = rows(machine).peers.into_keys().filter(|net| net.prefix_len() == net.max_prefix_len());
    let is_world =
        |address: &IpAddr| address.to_string().starts_with("192.0.2.") || address.to_string().starts_with("2001:db8::");
    hosts.map(|net| net.addr()).filter(is_world).collect()
}

fn addresses<const N: usize>(all: [&str; N]) -> BTreeSet<IpAddr> {
    all.map(|address| address.parse().expect("address")).into()
}

#[test]
fn an_answer_is_noted_when_the_rows_have_it_and_another_agent_knows_it() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.life.policy.import("a.yaml", RULES).await.expect("imported");
        let answers = [answer("api.test", &["192.0.2.7", "2001:db8::7"]), answer("other.example", &["192.0.2.8"])];
        agent.life.policy.learn(&answers, NOW).await.expect("noted");
        assert_eq!(known(&machine), addresses(["192.0.2.7", "2001:db8::7"]));
        let writes = machine.kernel.calls(Op::ChangePolicy);
        agent.life.policy.learn(&answers, NOW + 1).await.expect("known");
        assert_eq!(machine.kernel.calls(Op::ChangePolicy), writes, "nothing is new");
    });
    machine.life(async |agent| {
        assert_eq!(known(&machine), addresses(["192.0.2.7", "2001:db8::7"]));
        let names: Vec<String> = agent.life.policy.names().await.into_iter().map(|of| of.name).collect();
        assert_eq!(names, ["api.test", "other.example"]);
        // A rule that comes later finds what was asked before.
        let more = RULES.replace("*.test", "other.example").replace("names}", "more}");
        agent.life.policy.import("b.yaml", &more).await.expect("imported");
        assert!(known(&machine).contains(&"192.0.2.8".parse().expect("address")));
    });
}

#[test]
fn an_address_that_is_over_goes_unless_a_flow_uses_it() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        let policy = &agent.life.policy;
        policy.import("a.yaml", RULES).await.expect("imported");
        policy.learn(&[answer("api.test", &["192.0.2.7", "192.0.2.8"])], NOW).await.expect("noted");
        policy.forget_names(NOW + 1_000).await.expect("looked");
        assert_eq!(known(&machine), addresses(["192.0.2.7", "192.0.2.8"]), "their time is not over");
        machine.kernel.add_flow(connection([10, 88, 0, 2].into(), 40_000));
        policy.forget_names(LATER).await.expect("looked");
        assert_eq!(known(&machine), addresses(["192.0.2.7"]), "a connection uses it");
        machine.kernel.fail_next(Op::ObserveFlows, Kind::Exhausted);
        policy.forget_names(2 * LATER).await.expect_err("nobody knows what is used");
        assert_eq!(known(&machine), addresses(["192.0.2.7"]));
        machine.kernel.remove_flows(&FlowFilter::default()).await.expect("removed");
        policy.forget_names(2 * LATER).await.expect("looked");
        assert_eq!((known(&machine), policy.names().await.len()), (addresses([]), 0));
    });
}

#[test]
fn an_answer_that_the_kernel_refuses_is_not_passed_on_and_noted_later() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        let policy = &agent.life.policy;
        policy.import("a.yaml", RULES).await.expect("imported");
        machine.kernel.fail_next(Op::ChangePolicy, Kind::Exhausted);
        let refused = policy.learn(&[answer("api.test", &["192.0.2.7"])], NOW).await.expect_err("refused");
        assert!(matches!(refused, PolicyError::Kernel(_)), "{refused}");
        // The client asks again, and nothing is new; the rows are still missing.
        machine.kernel.fail_next(Op::ChangePolicy, Kind::Exhausted);
        policy.learn(&[answer("api.test", &["192.0.2.7"])], NOW + 1).await.expect_err("refused again");
        policy.learn(&[answer("api.test", &["192.0.2.7"])], NOW + 2).await.expect("noted");
        assert_eq!(known(&machine), addresses(["192.0.2.7"]));
        machine.kernel.fail_next(Op::ChangePolicy, Kind::Exhausted);
        policy.learn(&[answer("api.test", &["192.0.2.8"])], NOW).await.expect_err("refused");
        policy.ensure().await.expect("put right");
        assert_eq!(known(&machine), addresses(["192.0.2.7", "192.0.2.8"]));
    });
}

#[test]
fn all_that_is_over_goes_a_part_at_a_time() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let policy = &agent.life.policy;
        let answers: Vec<_> =
            (0..300).map(|n| answer(&format!("n{n}.test"), &[&format!("198.51.{}.{}", n / 100, n % 100)])).collect();
        policy.learn(&answers, NOW).await.expect("noted");
        policy.forget_names(LATER).await.expect("looked");
        assert_eq!(policy.names().await.len(), 44, "256 were looked for");
        policy.forget_names(LATER).await.expect("looked");
        assert_eq!(policy.names().await.len(), 0);
    });
}

#[test]
fn an_answer_that_says_the_same_again_is_kept_for_the_next_agent() {
    let machine = Machine::new();
    let began = machine.life(async |agent| {
        let policy = &agent.life.policy;
        let began = policy.names_now();
        policy.learn(&[answer("api.test", &["192.0.2.7"])], began).await.expect("noted");
        policy.learn(&[answer("api.test", &["192.0.2.7"])], began + 50_000).await.expect("known");
        policy.forget_names(began).await.expect("kept");
        began
    });
    machine.life(async |agent| {
        let policy = &agent.life.policy;
        policy.forget_names(began + 70_000).await.expect("looked");
        assert_eq!(policy.names().await.len(), 1);
        policy.forget_names(began + 120_000).await.expect("looked");
        assert_eq!(policy.names().await.len(), 0);
    });
}

#[test]
fn a_clock_that_is_set_ends_no_name() {
    const YEAR_MS: i64 = 365 * 86_400_000;
    let machine = Machine::new();
    for step in [0, YEAR_MS, -2 * YEAR_MS] {
        clock::step_unix_time(step);
        machine.life(async |agent| {
            let policy = &agent.life.policy;
            if step == 0 {
                policy.learn(&[answer("api.test", &["192.0.2.7"])], policy.names_now()).await.expect("noted");
            }
            clock::step_unix_time(step);
            policy.forget_names(policy.names_now()).await.expect("looked");
            let names = policy.names().await;
            let left = names.first().expect("a name").addresses[0].until_unix_ms.saturating_sub(clock::unix_ms());
            assert!((1..=60_000).contains(&left), "{left}");
        });
    }
}

#[test]
fn no_name_opens_a_service_or_what_is_near_the_node() {
    let mut machine = Machine::new();
    machine.config.service_cidr = vec!["10.96.0.0/12".parse().expect("network")];
    for life in 0..2 {
        machine.life(async |agent| {
            let policy = &agent.life.policy;
            if life == 0 {
                agent.create("c1").await;
                policy.import("a.yaml", RULES).await.expect("imported");
                let all = ["169.254.169.254", "::ffff:169.254.169.254", "127.0.0.1", "10.96.0.1", "192.0.2.7"];
                policy.learn(&[answer("api.test", &all)], policy.names_now()).await.expect("noted");
            }
            // Of the first agent by what it learned, of the second by what was kept.
            assert_eq!(known(&machine), addresses(["192.0.2.7"]));
            let hosts = rows(&machine).peers.into_keys().filter(|net| net.prefix_len() == net.max_prefix_len());
            let hosts: Vec<String> = hosts.map(|net| net.addr().to_string()).collect();
            let near = |text: &String| ["169.", "::ffff", "127.", "10.96."].iter().any(|begin| text.starts_with(begin));
            assert!(!hosts.iter().any(near), "{hosts:?}");
        });
    }
}

#[test]
fn an_answer_that_does_not_fit_takes_no_other_along() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        let policy = &agent.life.policy;
        let networks: Vec<String> = (0..wharf_common::map::IPCACHE_MAX - 50)
            .map(|n| format!("{}/32", std::net::Ipv4Addr::from(n + (11 << 24))))
            .collect();
        policy.import("a.yaml", RULES).await.expect("imported");
        // A text has 4 MiB at most.
        for (n, part) in networks.chunks(200_000).enumerate() {
            let rules = RULES.replace("name: names", &format!("name: part-{n}"));
            let (head, _) = rules.split_once("  - toFQDNs").expect("a rule");
            let rules = format!("{head}  - toCIDRSet: [{{cidr: 11.0.0.0/8, except: [{}]}}]\n", part.join(", "));
            policy.import(&format!("part-{n}.yaml"), &rules).await.expect("imported");
        }
        let many: Vec<String> = (0..100).map(|n| format!("198.51.100.{n}")).collect();
        let many = answer("many.test", &many.iter().map(String::as_str).collect::<Vec<_>>());
        let noted =
            policy.learn_each(&[answer("a.test", &["192.0.2.7"]), many, answer("b.test", &["192.0.2.8"])]).await;
        assert!(matches!(&noted[..], [Ok(()), Err(PolicyError::Rows(_)), Ok(())]), "{noted:?}");
        assert_eq!(known(&machine), addresses(["192.0.2.7", "192.0.2.8"]));
        let names: Vec<String> = policy.names().await.into_iter().map(|of| of.name).collect();
        assert_eq!(names, ["a.test", "b.test"]);
    });
}
