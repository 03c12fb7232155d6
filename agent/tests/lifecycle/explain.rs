//! The timeline of endpoints and what is explained with it: over creates, failed creates, deletes, stops and kills.

#[path = "explain_cluster.rs"]
mod cluster;

use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use wharf_agent::{
    explain,
    node::{
        endpoint::Handle,
        looks::{LOOKS, Purpose},
    },
    rest::id,
};
use wharf_api::{ErrorCode, Explanation, Health, LogStatus, SubjectKind, TimelineEntry};
use wharf_core::{
    kernel::{EndpointKernel as _, KernelErrorKind as Kind, ProgramSpec},
    plan::{CreateStep, DeleteOptions, DeleteStep},
    state::{Level, State},
};
use wharf_datapath::fake::Operation as Op;
use wharf_kit::clock;

use crate::support::*;

const TIMELINE: TableDefinition<(u16, u64), &[u8]> = TableDefinition::new("timeline");
const DAY_MS: u64 = 86_400_000;

/// The problem that a GET of one endpoint shows.
async fn problem_of(agent: &Agent, handle: &Handle) -> Option<String> {
    let shown = explain::links::with_problems(&agent.node, Purpose::Endpoint, std::slice::from_ref(handle)).await;
    shown.into_iter().next().expect("the endpoint").status.problem
}

#[test]
fn one_endpoint_is_shown_while_explanations_and_lists_wait_for_the_kernel() {
    for operation in [Op::ObserveCounters, Op::ObserveMissing] {
        Machine::new().life(async |agent| {
            let handle = agent.create("a").await;
            let calls = || agent.kernel.call_log().iter().filter(|(op, _)| *op == operation).count();
            let before = calls();
            let stuck = agent.kernel.hold(operation);
            let mut others = tokio::task::JoinSet::new();
            for _ in 0..LOOKS {
                let (agent, handle) = (agent.clone(), handle.clone());
                others.spawn(async move {
                    match operation {
                        Op::ObserveCounters => drop(explained(&agent, &handle.id.to_string()).await),
                        _ => drop(explain::links::with_problems(&agent.node, Purpose::List, &[handle]).await),
                    }
                });
            }
            eventually("all others stand in the kernel", || calls() == before + LOOKS).await;
            // Calls that come from now on pass; those at the first hold stay there.
            agent.kernel.hold(operation).release();
            assert_eq!(problem_of(&agent, &handle).await, None, "{operation:?}: the look waited for the others");
            stuck.release();
            others.join_all().await;
        });
    }
}

async fn explained(agent: &Agent, subject: &str) -> Explanation {
    explain::explain(&agent.node, subject).await.expect("a question that can be asked")
}

fn of<'a>(timeline: &'a [TimelineEntry], operation: &str) -> Vec<&'a TimelineEntry> {
    timeline.iter().filter(|e| e.operation == operation).collect()
}

fn phases<'a>(timeline: &'a [TimelineEntry], operation: &str) -> Vec<&'a str> {
    of(timeline, operation).into_iter().map(|e| e.phase.as_str()).collect()
}

/// Every step of a create, but for the commit that carries them.
fn create_steps() -> Vec<&'static str> {
    CreateStep::ALL.into_iter().filter(|s| *s != CreateStep::Commit).map(CreateStep::name).collect()
}

async fn write(agent: &Agent) {
    agent.write_timeline(clock::unix_ms()).await.expect("written");
}

fn fact<'a>(explanation: &'a Explanation, name: &str) -> &'a str {
    let found = explanation.facts.iter().find(|f| f.name == name);
    &found.unwrap_or_else(|| panic!("no {name}: {:?}", explanation.facts)).value
}

#[test]
fn the_entries_of_a_create_are_there_after_a_kill_right_behind_its_answer() {
    let machine = Machine::new();
    let id = machine.life(async |agent| agent.create("c1").await.id.get());
    machine.life(async |agent| {
        agent.quiet().await;
        let told = explained(&agent, &id.to_string()).await;
        assert_eq!((told.kind, told.health), (SubjectKind::Endpoint, Health::Ok), "{}", told.summary);
        assert!(
            told.summary.starts_with("ready for") && told.summary.ends_with("nothing is wrong"),
            "{}",
            told.summary
        );
        assert_eq!(phases(&told.timeline, "create"), create_steps());
        assert!(of(&told.timeline, "create").iter().all(|e| e.took_us.is_some() && e.outcome == LogStatus::Ok));
        assert_eq!(phases(&told.timeline, "restore"), ["build"], "and what this start did");
        assert!(told.timeline.is_sorted_by_key(|e| e.time_unix_ms));
        assert_eq!(told.kernel.expect("looked").findings, []);
    });
}

#[test]
fn the_timeline_costs_no_transaction_on_a_create_or_a_delete() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let all = || agent.life.store.stats().commits.load(std::sync::atomic::Ordering::Relaxed);
        let of_the_start = all();
        let commits = || all() - of_the_start;
        let handle = agent.create("c1").await;
        assert_eq!(commits(), 2, "intent, commit");
        assert_eq!(agent.delete(&handle).await.errors, []);
        assert_eq!(commits(), 4, "intent, removal");
        write(&agent).await;
        write(&agent).await;
        assert_eq!(commits(), 4, "a batch without anything to write writes nothing");
        agent.create("c2").await;
        write(&agent).await;
        assert_eq!(commits(), 7, "the length of the commit itself");
        write(&agent).await;
        assert_eq!(commits(), 7);
    });
}

#[test]
fn a_deleted_endpoint_is_explained_by_each_of_its_names_also_after_a_kill() {
    let machine = Machine::new();
    // As long as a runtime's.
    let container = "0123456789abcdef".repeat(4);
    let record = machine.life(async |agent| {
        let handle = agent.create(&container).await;
        assert_eq!(agent.delete(&handle).await.errors, []);
        handle.shared.read(|v| v.record.clone())
    });
    machine.life(async |agent| {
        let names = [
            record.id.to_string(),
            container.clone(),
            format!("{container}/eth0"),
            format!("cni-attachment-id:{container}:eth0"),
            record.host_ifname.to_string(),
        ];
        for name in names {
            let told = explained(&agent, &name).await;
            assert_eq!((told.kind, told.health), (SubjectKind::PastEndpoint, Health::Ok), "{name}: {}", told.summary);
            assert!(
                told.summary.starts_with("deleted ") && told.summary.ends_with("nothing of it is left"),
                "{}",
                told.summary
            );
            assert_eq!(phases(&told.timeline, "create"), [&create_steps()[..], &["commit"]].concat());
            let steps = [
                DeleteStep::WriteIntent,
                DeleteStep::Detach,
                DeleteStep::RemoveReachable,
                DeleteStep::AwaitProxy,
                DeleteStep::Unpin,
                DeleteStep::RemoveLink,
                DeleteStep::AwaitKernel,
                DeleteStep::RemoveRecord,
            ];
            assert_eq!(phases(&told.timeline, "delete"), steps.map(DeleteStep::name));
            assert_eq!(told.before, [], "nobody else");
        }
        for ip in record.addresses() {
            let told = explained(&agent, &ip.to_string()).await;
            assert_eq!(told.kind, SubjectKind::Address);
            assert_eq!(told.before.len(), 1, "who had it");
            assert_eq!(told.before[0].attachment, record.attachment.to_string());
        }
    });
}

#[test]
fn a_number_that_is_being_made_ready_for_another_is_not_held_against_who_had_it() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        let record = handle.shared.read(|v| v.record.clone());
        assert_eq!(agent.delete(&handle).await.errors, []);
        let making_ready = agent.life.endpoints.jobs.working_on(record.id);
        let spec = ProgramSpec {
            id: record.id,
            container_mac: record.container_mac,
            host_mac: record.host_mac,
            debug: false,
            keep: false,
        };
        agent.kernel.ensure_programs(&spec).await.expect("programs of the next one");
        let told = explained(&agent, "c1").await;
        assert_eq!((told.kind, told.health), (SubjectKind::PastEndpoint, Health::Ok), "{}", told.summary);
        drop(making_ready);
        let told = explained(&agent, "c1").await;
        assert_eq!(told.health, Health::Failing, "nobody's programs may be its own: {}", told.summary);
        agent.kernel.remove_programs(record.id).await.expect("removed");
    });
}

#[test]
fn a_failed_create_is_explained_with_its_cause_and_its_undo() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.kernel.fail_next(Op::EnsureAttached, Kind::Permission);
        agent.try_create(agent.container("c1")).await.expect_err("fails");
    });
    machine.life(async |agent| {
        let told = explained(&agent, "c1").await;
        assert_eq!((told.kind, told.health), (SubjectKind::PastEndpoint, Health::Ok), "{}", told.summary);
        assert!(told.summary.starts_with("its create failed "), "{}", told.summary);
        let errors: Vec<&str> = told.errors.iter().map(|e| e.phase.as_str()).collect();
        assert_eq!(errors, ["ensure-attached"], "said once: {:?}", told.errors);
        assert!(told.summary.contains(&told.errors[0].text), "{}", told.summary);
        let undone = phases(&told.timeline, "undo");
        assert_eq!(
            undone,
            ["detach", "await-proxy", "remove-link", "remove-programs", "release-leases"],
            "the rest is the commit of this"
        );
        agent.assert_nothing_left().await;
    });
}

#[test]
fn a_create_that_a_kill_interrupted_is_told_of() {
    let machine = Machine::new();
    let running = machine.start().expect("starts");
    let hold = machine.kernel.hold(Op::EnsureAttached);
    let agent = running.agent.clone();
    running.run(async {
        let _create = agent.spawn_create(agent.container("c1"));
        hold.reached().await;
    });
    drop(agent);
    running.kill();
    hold.release();
    machine.life(async |agent| {
        let told = explained(&agent, "c1").await;
        assert_eq!(told.kind, SubjectKind::PastEndpoint);
        assert!(
            told.timeline.iter().any(|e| e.text.contains("the agent ended while it was being created")),
            "{told:?}"
        );
    });
}

#[test]
fn a_delete_that_fails_is_told_with_what_it_waits_for_and_again_after_a_restart() {
    let machine = Machine::new();
    machine.kernel.fail_always(Op::RemoveLink, Kind::Other);
    let running = machine.start().expect("starts");
    let id = running.run(async {
        let agent = &running.agent;
        let handle = agent.create("c1").await;
        assert!(!agent.delete(&handle).await.errors.is_empty());
        let told = explained(agent, "c1").await;
        assert_eq!((told.kind, told.health), (SubjectKind::Endpoint, Health::Degraded), "{}", told.summary);
        assert!(told.summary.starts_with("disconnecting for "), "{}", told.summary);
        let wait = told.waits.expect("waits");
        assert!(!wait.waits_for.is_empty() && !wait.ends_when.is_empty(), "{wait:?}");
        assert_eq!(told.errors[0].phase, "remove-link");
        assert!(told.summary.contains(&told.errors[0].text), "the cause is in the conclusion: {}", told.summary);
        let left = told.kernel.expect("looked").findings;
        assert!(left.iter().any(|f| f.object == "link"), "what is left of it: {left:?}");
        write(agent).await;
        handle.id.get()
    });
    running.kill();
    machine.kernel.mend(Op::RemoveLink);
    machine.life(async |agent| {
        agent.quiet().await;
        let told = explained(&agent, &id.to_string()).await;
        assert_eq!(told.kind, SubjectKind::PastEndpoint, "this start has finished it: {}", told.summary);
        assert!(told.errors.iter().any(|e| e.phase == "remove-link"), "what failed before: {:?}", told.timeline);
        let begun = phases(&told.timeline, "delete").iter().filter(|p| **p == "write-intent").count();
        assert_eq!(begun, 2, "asked for twice");
    });
}

#[test]
fn after_a_day_what_has_ended_is_forgotten_and_what_lives_is_not() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("lives").await;
        let handle = agent.create("c1").await;
        assert_eq!(agent.delete(&handle).await.errors, []);
        let now = clock::unix_ms();
        agent.write_timeline(now + DAY_MS - 60_000).await.expect("written");
        assert_eq!(explained(&agent, "c1").await.kind, SubjectKind::PastEndpoint);
        agent.write_timeline(now + DAY_MS + 60_000).await.expect("written");
        let told = explained(&agent, "c1").await;
        assert_eq!(told.kind, SubjectKind::Unknown, "{}", told.summary);
        assert!(!told.searched.is_empty());
        assert_eq!(explained(&agent, "lives").await.kind, SubjectKind::Endpoint);
    });
    let database = Database::create(machine.store_path()).expect("open");
    let txn = database.begin_read().expect("begin");
    assert_eq!(txn.open_table(TIMELINE).expect("table").iter().expect("rows").count(), 1, "nor is it in the store");
}

#[test]
fn rows_that_cannot_be_read_harm_nothing() {
    let machine = Machine::new();
    machine.life(async |agent| drop(agent.create("c1").await));
    {
        let database = Database::create(machine.store_path()).expect("open");
        let txn = database.begin_write().expect("begin");
        {
            let mut table = txn.open_table(TIMELINE).expect("table");
            table.insert((9, 9), b"{not json".as_slice()).expect("insert");
            table.insert((7, 7), b"{}".as_slice()).expect("insert");
        }
        txn.commit().expect("commit");
    }
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        assert_eq!(phases(&explained(&agent, "c1").await.timeline, "create"), create_steps());
        agent.assert_healthy().await;
    });
}

#[test]
fn a_timeline_of_another_kind_keeps_nothing_from_coming_or_going() {
    let machine = Machine::new();
    {
        let database = Database::create(machine.store_path()).expect("open");
        let txn = database.begin_write().expect("begin");
        let other: TableDefinition<u64, u64> = TableDefinition::new("timeline");
        txn.open_table(other).expect("table").insert(1, 1).expect("insert");
        txn.commit().expect("commit");
    }
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        assert_eq!(agent.delete(&handle).await.errors, []);
        agent.assert_nothing_left().await;
        let dropped = agent.life.store.stats().timeline_dropped.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(dropped, 2, "and it is counted");
        let told = explained(&agent, "c1").await;
        assert_eq!(told.kind, SubjectKind::PastEndpoint);
        let all: Vec<_> = CreateStep::ALL.into_iter().map(CreateStep::name).collect();
        assert_eq!(phases(&told.timeline, "create"), all, "memory knows what the store had no room for");
        agent.write_timeline(clock::unix_ms()).await.expect_err("still no room");
        assert_eq!(phases(&explained(&agent, "c1").await.timeline, "create"), all);
    });
}

#[test]
fn a_create_that_failed_without_room_for_its_timeline_is_explained_with_its_cause() {
    let machine = Machine::new();
    {
        let database = Database::create(machine.store_path()).expect("open");
        let txn = database.begin_write().expect("begin");
        let other: TableDefinition<u64, u64> = TableDefinition::new("timeline");
        txn.open_table(other).expect("table").insert(1, 1).expect("insert");
        txn.commit().expect("commit");
    }
    machine.life(async |agent| {
        agent.kernel.fail_next(Op::EnsureLink, Kind::Exhausted);
        let refused = agent.try_create(agent.container("c1")).await.expect_err("the kernel refuses").message;
        let told = explained(&agent, "c1").await;
        let cause = refused.strip_suffix(" (create endpoint net/c1:eth0)").expect("cause, operation and subject");
        assert!(told.summary.contains(cause), "{cause:?} is not in {:?}", told.summary);
    });
}

#[test]
fn a_create_that_failed_on_a_full_disk_is_explained_with_its_cause() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.disk.fill();
        agent.try_create(agent.container("c1")).await.expect_err("no room");
        for look in ["at once", "after a batch that failed too"] {
            let told = explained(&agent, "c1").await;
            assert!(told.summary.contains("store commit"), "{look}: {:?}", told.summary);
            agent.write_timeline(clock::unix_ms()).await.expect_err("no room");
        }
        agent.disk.mend();
        write(&agent).await;
    });
    machine.life(async |agent| {
        let told = explained(&agent, "c1").await;
        assert!(told.summary.contains("store commit"), "after a restart: {:?}", told.summary);
    });
}

#[test]
fn a_full_disk_keeps_the_notes_until_there_is_room() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        agent.request(&handle, Level::Datapath).await.await.expect("answer").expect("built");
        agent.disk.fill();
        agent.write_timeline(clock::unix_ms()).await.expect_err("no room");
        agent.disk.mend();
        write(&agent).await;
    });
    machine.life(async |agent| {
        let told = explained(&agent, "c1").await;
        assert_eq!(phases(&told.timeline, "regenerate"), ["build"], "{:?}", told.timeline);
    });
}

#[test]
fn a_record_that_went_without_a_word_ends_its_life_at_the_next_start() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        write(&agent).await;
        // As an agent does it that does not know the timeline.
        let removals =
            wharf_agent::endpoint::record::removals(&agent.life.network.addresses, &handle.shared.view().record, true);
        agent.commit(removals).await;
    });
    machine.life(async |agent| {
        let told = explained(&agent, "c1").await;
        assert_eq!(told.kind, SubjectKind::PastEndpoint);
        assert!(told.summary.contains("nobody noted how"), "{}", told.summary);
    });
}

#[test]
fn a_kernel_that_does_not_answer_leaves_the_rest_of_the_explanation() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let hold = machine.kernel.hold(Op::ObserveEndpoint);
        let told = explained(&agent, "c1").await;
        hold.release();
        assert_eq!(state(&handle), State::Ready);
        assert_eq!(told.health, Health::Degraded);
        let why = told.kernel.expect("a look").could_not_look.expect("that told nothing");
        assert!(why.contains("did not answer"), "{why}");
        assert!(told.summary.contains(&why), "{}", told.summary);
        assert_eq!(phases(&told.timeline, "create").len(), 9);
    });
}

#[test]
fn several_that_are_meant_are_listed_and_none_is_chosen() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("abc1").await;
        agent.create("abc2").await;
        agent.try_create(Agent::spec("abc1", "eth1")).await.expect("created");
        let told = explained(&agent, "abc").await;
        assert_eq!((told.kind, told.candidates.len()), (SubjectKind::Several, 3));
        assert_eq!(explained(&agent, "abc1").await.candidates.len(), 2, "a whole id wins over a longer one");
        assert_eq!(explained(&agent, "abc1/eth1").await.kind, SubjectKind::Endpoint);
        let unknown = explained(&agent, "abcdef").await;
        assert_eq!((unknown.kind, unknown.candidates.len()), (SubjectKind::Unknown, 3), "what is near");
        explain::explain(&agent.node, "a b").await.expect_err("no question");
    });
}

#[test]
fn every_request_takes_the_names_that_explain_takes() {
    Machine::new().life(async |agent| {
        let (one, other) = (agent.create("web-3f9c51aa").await, agent.create("web-3f9d").await);
        let find =
            |text: &str| id::find(&agent.life.endpoints.registry, &id::parse(text).expect(text), text).map(|h| h.id);
        let link = one.shared.read(|v| v.record.host_ifname.to_string());
        let of_address = addresses(&one)[0].to_string();
        for name in ["web-3f9c", "web-3f9c51aa/eth0", "net/web-3f9c51aa:eth0", &link, &of_address, &one.id.to_string()]
        {
            assert_eq!(find(name).ok(), Some(one.id), "{name}");
            assert_eq!(explained(&agent, name).await.endpoint.map(|e| e.id), Some(one.id.get()), "{name}");
        }
        // What runtimes use is never taken for the beginning of another.
        for exact in ["container-id:web-3f9c", "cni-attachment-id:web-3f9c:eth0"] {
            assert_eq!(find(exact).map_err(|e| e.0.code), Err(ErrorCode::NotFound), "{exact}");
        }
        let several = find("web-3f9").expect_err("two").0;
        assert_eq!(several.code, ErrorCode::Exists);
        for candidate in [&one, &other] {
            assert!(several.message.contains(&format!("{} (", candidate.id)), "{}", several.message);
        }
        assert_eq!(find("nobody").map_err(|e| e.0.code), Err(ErrorCode::NotFound));
    });
}

#[test]
fn addresses_are_explained_whoever_has_them() {
    let mut machine = Machine::new();
    machine.config.ip_rest_ms = 3_600_000;
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let ip = addresses(&handle)[0];
        assert_eq!(explained(&agent, &ip.to_string()).await.kind, SubjectKind::Endpoint);
        assert_eq!(agent.delete(&handle).await.errors, []);
        let told = explained(&agent, &ip.to_string()).await;
        assert!(told.summary.starts_with("resting for "), "{}", told.summary);
        assert!(fact(&told, "last owner").contains("c1"));
        let held = agent.lease_to_caller("somebody").await.ip;
        let told = explained(&agent, &held.to_string()).await;
        assert!(told.summary.contains("by a caller of the API, \"somebody\""), "{}", told.summary);
        let of_health = agent.lease_to_caller(wharf_agent::node::health::NAME).await.ip;
        let told = explained(&agent, &of_health.to_string()).await;
        assert!(told.summary.contains("for the health endpoint"), "{}", told.summary);
        for (ip, expected) in [
            ("10.88.0.1", "the node's own"),
            ("10.88.0.200", "free; nobody has had it"),
            ("192.0.2.1", "outside this node's pools"),
        ] {
            let told = explained(&agent, ip).await;
            assert_eq!((told.kind, told.health), (SubjectKind::Address, Health::Ok), "{ip}");
            assert!(told.summary.starts_with(expected), "{ip}: {}", told.summary);
        }
        let kept = agent.create("c2").await;
        let ip = addresses(&kept)[0];
        agent.spawn_delete(&[&kept], DeleteOptions { no_ip_release: true }).await.expect("deleted");
        let told = explained(&agent, &ip.to_string()).await;
        assert!(told.summary.contains("was asked to keep its address"), "{}", told.summary);
    });
}

#[test]
fn what_is_out_of_the_tables_is_explained_too() {
    let machine = Machine::new();
    let record = machine.life(async |agent| agent.create("c1").await.shared.read(|v| v.record.clone()));
    std::fs::write(machine.store_path(), vec![0xa5; 65_536]).expect("overwrite");
    machine.life(async |agent| {
        for name in [record.id.to_string(), "c1".into(), record.addresses().next().expect("address").to_string()] {
            let told = explained(&agent, &name).await;
            assert_eq!((told.kind, told.health), (SubjectKind::Orphan, Health::Degraded), "{name}: {}", told.summary);
            assert!(told.summary.contains("its record was lost"), "{}", told.summary);
        }
    });
}

#[test]
fn a_deletion_record_that_waits_is_told_of() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let handle = agent.create("c1").await;
        agent.queue_deletion(&attachment("c1", "eth0"), Some(&handle));
        let told = explained(&agent, "c1").await;
        assert_eq!(told.health, Health::Degraded);
        assert!(told.summary.contains("its deletion record still waits"), "{}", told.summary);
        agent.queue_deletion(&attachment("stranger", "eth0"), None);
        let told = explained(&agent, "stranger").await;
        assert_eq!(told.kind, SubjectKind::DeletionRecord, "{}", told.summary);
        agent.drain().await;
    });
}
