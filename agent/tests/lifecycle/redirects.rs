//! Redirects that follow from policy: the proxy has them before rows lead there, keeps their ports, and holds nothing
//! up.

use std::{collections::BTreeSet, time::Duration};

use tokio::time::Instant;
use wharf_agent::{
    endpoint::{
        create::CreateSpec,
        refusals::{self, Told},
    },
    node::endpoint::Handle,
    policy::{Ask, destination},
    proxy::{RedirectTable, Redirects as _},
};
use wharf_api::{PolicyProtocol, PolicyVerdict};
use wharf_common::policy::{REDIRECT, REDIRECT_PORT_SHIFT, RULING};
use wharf_core::{kernel::KernelErrorKind, policy::PolicyRows};
use wharf_datapath::fake::Operation as Op;

use crate::{policy::rows, support::*};

/// Every endpoint gets requests for this path alone at port 80.
pub(crate) fn only(path: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: web}}\nspec:\n  \
         endpointSelector: {{}}\n  ingress:\n  - toPorts:\n    - ports: [{{port: '80', protocol: TCP}}]\n      \
         rules: {{http: [{{path: {path}}}]}}\n"
    )
}

/// Ports of the proxy that rows lead to.
fn ports(rows: &PolicyRows) -> BTreeSet<u16> {
    let rulings = rows.cells.values().map(|(cell, _)| cell.rest.ruling);
    let port = |ruling: u32| u16::try_from(ruling >> REDIRECT_PORT_SHIFT).expect("port");
    rulings.filter(|ruling| ruling & RULING == REDIRECT).map(port).collect()
}

/// Ports with the ids of their members.
fn shape(wanted: &RedirectTable) -> Vec<(u16, Vec<u16>)> {
    wanted.iter().map(|(port, r)| (*port, r.members.keys().map(|(id, _)| id.get()).collect())).collect()
}

fn last(agent: &Agent) -> Vec<(u16, Vec<u16>)> {
    agent.proxy.told().last().map(shape).unwrap_or_default()
}

#[test]
fn the_proxy_knows_a_listener_and_its_members_before_rows_lead_there() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.proxy.is_silent(true);
        let first = agent.create("c1").await;
        let text = only("/a");
        let import = agent.life.policy.import("a.yaml", &text);
        tokio::pin!(import);
        tokio::select! {
            _ = &mut import => panic!("rows did not wait for the proxy"),
            () = eventually("the proxy is told", || last(&agent) == [(15_000, vec![first.id.get()])]) => {}
        }
        assert_eq!(ports(&rows(&machine)), [].into());
        agent.proxy.is_silent(false);
        let change = import.await.expect("imported");
        assert_eq!((change.revision, change.realized), (1, 1));
        assert_eq!(ports(&rows(&machine)), [15_000].into());
        let second = agent.create("c2").await;
        assert_eq!(last(&agent), [(15_000, vec![first.id.get(), second.id.get()])]);
        assert!(agent.delete(&second).await.errors.is_empty());
        assert_eq!(last(&agent), [(15_000, vec![first.id.get()])]);
    });
}

#[test]
fn old_and_new_listeners_are_there_while_rows_change() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let own = vec![handle.id.get()];
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        agent.life.policy.import("a.yaml", &only("/b")).await.expect("imported");
        let told: Vec<_> = agent.proxy.told().iter().map(shape).collect();
        let both = vec![(15_000, own.clone()), (15_001, own.clone())];
        assert!(told.ends_with(&[both, vec![(15_001, own)]]), "{told:?}");
        agent.life.policy.delete_all().await.expect("deleted");
        assert_eq!(last(&agent), []);
    });
}

#[test]
fn a_listener_keeps_its_members_for_the_handshakes_that_began_before_rows_changed() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let own = vec![agent.create("c1").await.id.get()];
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        let text = only("/b");
        let import = agent.life.policy.import("a.yaml", &text);
        tokio::pin!(import);
        let has_rows = || ports(&rows(&machine)) == [15_001].into();
        tokio::select! {
            _ = &mut import => panic!("realized before the old listener went"),
            () = eventually("the rows change", has_rows) => {}
        }
        let changed = Instant::now();
        // What comes meanwhile neither takes them away nor lets them stay longer.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let second = agent.create("c2").await.id.get();
        assert_eq!(last(&agent), [(15_000, own.clone()), (15_001, vec![own[0], second])]);
        let gone = || last(&agent) == [(15_001, vec![own[0], second])];
        tokio::select! {
            _ = &mut import => panic!("realized before its connections ended"),
            () = eventually("the old listener goes", gone) => {}
        }
        let stayed = changed.elapsed();
        assert!((400..700).contains(&stayed.as_millis()), "{stayed:?}");
        assert_eq!(import.await.expect("imported").realized, 2);
    });
}

#[test]
fn a_port_that_is_taken_again_judges_nobody_by_the_rules_of_others() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let first = agent.create("c1").await;
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        // Port 15000 is free for rows, and its listener still has the endpoint.
        let text = only("/b");
        let import = agent.life.policy.import("a.yaml", &text);
        tokio::pin!(import);
        tokio::select! {
            _ = &mut import => panic!("realized before the old listener went"),
            () = eventually("the rows change", || ports(&rows(&machine)) == [15_001].into()) => {}
        }
        let job = agent.container("job");
        let job = CreateSpec { labels: ["k8s:app=job".parse().expect("label")].into(), ..job };
        let job = agent.handle(agent.try_create(job).await.expect("created").id);
        let text = only("/c").replace("name: web", "name: job");
        let text = text.replace("endpointSelector: {}", "endpointSelector: {matchLabels: {app: job}}");
        agent.life.policy.import("b.yaml", &text).await.expect("imported");
        let told = agent.proxy.told();
        let of_job: Vec<_> = told.iter().filter_map(|wanted| wanted.get(&15_000)).collect();
        let listener = of_job.last().expect("the port is taken again").listener.clone();
        let members = of_job.iter().filter(|redirect| redirect.listener == listener).flat_map(|r| r.members.keys());
        let members: BTreeSet<_> = members.map(|(id, _)| *id).collect();
        assert_eq!(members, [job.id].into(), "{} is not judged by it", first.id);
    });
}

#[test]
fn a_proxy_that_does_not_answer_holds_rows_up_for_half_a_second_and_a_missing_one_not_at_all() {
    for is_gone in [false, true] {
        let machine = Machine::new();
        machine.life(async |agent| {
            agent.create("c1").await;
            if is_gone {
                agent.proxy.is_gone()
            } else {
                agent.proxy.is_silent(true)
            }
            let began = Instant::now();
            let change = agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
            let waited = began.elapsed() >= Duration::from_millis(500);
            assert_eq!(waited, !is_gone);
            assert_eq!((change.revision, change.realized), (1, 0), "not before the proxy has acknowledged");
            assert_eq!(ports(&rows(&machine)), [15_000].into(), "connections are dropped until then");
            let problem = agent.life.policy.list().await.problem.expect("a problem");
            assert!(problem.contains("the proxy does not do what policy asks: it is silent"), "{problem}");
            agent.proxy.is_silent(false);
            agent.life.policy.ensure().await.expect("looked");
            let list = agent.life.policy.list().await;
            assert_eq!((list.realized, list.problem), (1, None));
        });
    }
}

#[test]
fn ports_outlive_the_agent_and_nothing_else_takes_them() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        agent.life.policy.import("a.yaml", &only("/b")).await.expect("imported");
    });
    assert_eq!(ports(&rows(&machine)), [15_001].into());
    let earlier = machine.proxy.told().len();
    machine.life(async |agent| {
        assert_eq!(ports(&rows(&machine)), [15_001].into());
        assert_eq!(last(&agent).len(), 1, "as before");
        let told = agent.proxy.told().split_off(earlier);
        assert!(
            !told.is_empty() && told.iter().all(|wanted| wanted.contains_key(&15_001)),
            "never without it: {told:?}"
        );
    });
    std::fs::remove_file(machine.config.state_dir.join("redirects.json")).expect("the file of the ports");
    machine.life(async |agent| {
        let realized = async {
            while agent.life.policy.list().await.realized < 2 {
                agent.life.policy.ensure().await.expect("looked");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), realized).await.expect("the old port's connections end");
        assert_eq!(ports(&rows(&machine)), [15_000].into(), "what the old port was for is not known");
        assert_eq!(last(&agent), [(15_000, vec![1])]);
    });
}

#[test]
fn an_endpoint_that_the_proxy_was_asked_to_drop_is_asked_away_before_its_rows() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        let handle = agent.create("c1").await;
        let acknowledge = agent.proxy.answers_late(handle.id, "ingress-15000");
        let operations = agent.operations().len();
        let delete = agent.delete(&handle);
        tokio::pin!(delete);
        let asked = || agent.proxy.asked().iter().any(|(id, _)| *id == handle.id);
        tokio::select! {
            _ = &mut delete => panic!("the delete did not wait"),
            () = eventually("the proxy is asked", asked) => {}
        }
        assert!(!agent.operations()[operations..].contains(&Op::ChangePolicy), "its rows are there");
        acknowledge.send(()).expect("the delete waits");
        assert!(delete.await.errors.is_empty());
    });
}

#[test]
fn a_change_of_which_the_proxy_refuses_a_listener_is_refused() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        agent.proxy.refuses_port(Some(15_001));
        let refused = agent.life.policy.import("a.yaml", &only("/b")).await.expect_err("refused");
        assert_eq!(refused.to_string(), "the port is taken; the policies of before stay in force");
        assert_eq!(ports(&rows(&machine)), [15_000].into(), "what was in force is");
        assert_eq!(last(&agent).len(), 1, "and the proxy has no more than that");
        let list = agent.life.policy.list().await;
        assert_eq!((list.revision, list.realized, list.problem), (1, 1, None));
        // An endpoint that comes has its rows, computed from those.
        agent.create("c2").await;
        assert_eq!(last(&agent), [(15_000, vec![1, 2])]);
        agent.proxy.refuses_port(None);
        let change = agent.life.policy.import("a.yaml", &only("/b")).await.expect("imported");
        assert_eq!((change.revision, change.realized), (2, 2));
    });
}

#[test]
fn a_revision_is_realized_when_no_connection_is_judged_by_requests_of_before() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        let began = Instant::now();
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        assert!(began.elapsed() < Duration::from_secs(2), "nothing ends");
        let text = only("/b");
        let import = agent.life.policy.import("a.yaml", &text);
        tokio::pin!(import);
        let has_rows = || ports(&rows(&machine)) == [15_001].into();
        tokio::select! {
            _ = &mut import => panic!("realized before the proxy has ended connections"),
            () = eventually("the rows change", has_rows) => {}
        }
        let list = agent.life.policy.list().await;
        assert_eq!((list.revision, list.realized), (2, 1));
        assert!(list.problem.expect("a problem").contains("ends connections of before"));
        let change = import.await.expect("imported");
        assert_eq!((change.revision, change.realized), (2, 2));
        assert!(began.elapsed() >= Duration::from_millis(2_500));
    });
}

#[test]
fn a_later_change_does_not_hide_what_the_proxy_owes() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.proxy.is_silent(true);
        let change = agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        assert_eq!((change.revision, change.realized), (1, 0));
        let plain = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: plain, namespace: default}\nspec:\n  \
                     podSelector: {}\n  policyTypes: [Egress]\n";
        let change = agent.life.policy.import("b.yaml", plain).await.expect("imported");
        assert_eq!((change.revision, change.realized), (2, 0), "the proxy has not acknowledged the first change");
        agent.proxy.is_silent(false);
        agent.life.policy.ensure().await.expect("looked");
        assert_eq!(agent.life.policy.list().await.realized, 2);
    });
}

#[test]
fn a_refusal_is_told_once_in_the_log_of_each_endpoint_of_the_listener() {
    Machine::new().life(async |agent| {
        let first = agent.create("c1").await;
        let other = agent.container("job");
        let other = agent.try_create(CreateSpec { labels: ["k8s:app=job".parse().expect("label")].into(), ..other });
        let other = agent.handle(other.await.expect("created").id);
        let text = only("/a").replace("endpointSelector: {}", "endpointSelector: {matchLabels: {app: web}}");
        agent.life.policy.import("a.yaml", &text).await.expect("imported");
        let mut told = Told::new();
        let refusals = |handle: &Handle| log_of(handle).into_iter().filter(|l| l.starts_with("proxy: ")).count();
        let mut looked = |handles: &[&Handle]| {
            refusals::tell(&*agent.life.policy.proxy.redirects, &agent.life.endpoints.registry, &mut told);
            handles.iter().map(|handle| refusals(handle)).collect::<Vec<_>>()
        };
        assert_eq!(looked(&[&first, &other]), [0, 0]);
        agent.proxy.refuses_listener("ingress-15000", "no such filter");
        assert_eq!(looked(&[&first, &other]), [1, 0]);
        assert!(log_of(&first).contains(&"proxy: ingress-15000 was refused: no such filter".to_owned()));
        let second = agent.create("c2").await;
        assert_eq!(looked(&[&first, &other, &second]), [1, 0, 1], "once, and to one that comes later");
        agent.proxy.refuses_listener("ingress-15000", "another reason");
        assert_eq!(looked(&[&first, &other, &second]), [2, 0, 2]);
        agent.proxy.accepts();
        assert_eq!(looked(&[&first]), [2]);
        agent.proxy.refuses_listener("ingress-15000", "another reason");
        assert_eq!(looked(&[&first]), [3], "it is another refusal");
    });
}

#[test]
fn a_policy_whose_way_to_the_proxy_cannot_be_made_is_wanted_and_tried_again() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.kernel.fail_next(Op::EnsureWayToProxy, KernelErrorKind::Other);
        let refused = agent.life.policy.import("a.yaml", &only("/a")).await.expect_err("no way");
        assert!(refused.to_string().starts_with("put policy into the kernel"), "{refused}");
        // What comes meanwhile does not hide it.
        let list = agent.life.policy.list().await;
        assert_eq!((list.revision, list.realized, list.problem.is_some()), (1, 0, true));
        agent.life.policy.ensure().await.expect("made");
        let list = agent.life.policy.list().await;
        assert_eq!((list.revision, list.realized, list.problem), (1, 1, None));
        assert_eq!(ports(&rows(&machine)), [15_000].into());
    });
}

#[test]
fn explain_and_rules_name_the_listener_and_what_passes() {
    const WEB: &str = "
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {}
  ingress:
  - toPorts:
    - ports: [{port: '80', protocol: TCP}]
      rules: {http: [{method: GET, path: '/public.*'}], failOpen: true}
";
    let machine = Machine::new();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        agent.life.policy.import("web.yaml", WEB).await.expect("imported");
        let (source, own) = ("192.0.2.1".parse().expect("address"), addresses(&handle)[0]);
        let judged = async |port| {
            let to_port = destination(PolicyProtocol::Tcp, port).expect("a port");
            let ask = Ask { from: None, source, to: Some(handle.id), destination: own, to_port };
            agent.life.policy.explain(ask).await.ingress.expect("judged")
        };
        let passes = judged(80).await;
        assert_eq!((passes.verdict, passes.rule.is_some()), (PolicyVerdict::Accept, true));
        let way = passes.redirect.expect("a redirect");
        assert_eq!((way.port, way.passes.concat(), way.fails_open), (15_000, "GET /public...".to_owned(), true));
        let denied = judged(81).await;
        assert_eq!((denied.verdict, denied.redirect), (PolicyVerdict::Deny, None));
        let rows = agent.life.policy.endpoint(handle.id).await.expect("rules").ingress.rows;
        assert!(rows.iter().any(|row| row.verdict == "redirect 15000" && row.ports == ["TCP 80"]), "{rows:?}");
    });
}

#[test]
fn in_audit_mode_explain_says_that_the_proxy_sees_nothing() {
    let mut machine = Machine::new();
    machine.config.policy_audit = true;
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
        let to_port = destination(PolicyProtocol::Tcp, 80).expect("a port");
        let source = "192.0.2.1".parse().expect("address");
        let ask = Ask { from: None, source, to: Some(handle.id), destination: addresses(&handle)[0], to_port };
        let note = agent.life.policy.explain(ask).await.note.expect("a note");
        assert_eq!(note, "audit mode: the connection does not go through the proxy, and passes unseen");
    });
}

#[test]
fn a_refused_change_leaves_the_proxy_what_rows_of_an_earlier_agent_lead_to() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.life.policy.import("a.yaml", &only("/a")).await.expect("imported");
    });
    machine.proxy.set(RedirectTable::new());
    machine.kernel.fail_next(Op::ObservePolicy, KernelErrorKind::Other);
    machine.life(async |agent| {
        assert_eq!(last(&agent), [], "the rows could not be read at the start");
        agent.proxy.refuses_port(Some(15_001));
        agent.life.policy.import("a.yaml", &only("/b")).await.expect_err("refused");
        assert_eq!(ports(&rows(&machine)), [15_000].into());
        assert_eq!(last(&agent), [(15_000, vec![1])], "rows lead there");
    });
}
