//! The store's file: of another boot, damaged, of a newer agent; and the numbers that must never come back.

use std::{
    collections::BTreeSet,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    panic::{AssertUnwindSafe, catch_unwind},
};

use redb::{Database, ReadableDatabase as _, TableDefinition};
use wharf_core::{
    ids::PoolName,
    kernel::EndpointKernel as _,
    store::{Change, Rest},
};

use crate::support::*;

const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");
const ENDPOINTS: TableDefinition<u16, &[u8]> = TableDefinition::new("endpoints");

fn put_meta(machine: &Machine, key: &str, value: &[u8]) {
    let database = Database::create(machine.store_path()).expect("open");
    let txn = database.begin_write().expect("begin");
    txn.open_table(META).expect("table").insert(key, value).expect("insert");
    txn.commit().expect("commit");
}

fn meta(machine: &Machine, key: &str) -> Vec<u8> {
    let database = Database::create(machine.store_path()).expect("open");
    let txn = database.begin_read().expect("begin");
    let value = txn.open_table(META).expect("table").get(key).expect("get").expect("row");
    value.value().to_vec()
}

#[test]
fn a_store_of_another_boot_is_set_aside_and_the_slate_is_clean() {
    let mut machine = Machine::new();
    let first = machine.life(async |agent| agent.create("c1").await.epoch);
    machine.boot_id = "second boot".into();
    machine.kernel = wharf_datapath::FakeKernel::new();
    machine.life(async |agent| {
        assert!(agent.set_aside.as_ref().is_some_and(|a| a.contains("another boot")), "{:?}", agent.set_aside);
        agent.assert_nothing_left().await;
        assert!(agent.create("c1").await.epoch > first, "epochs go on");
    });
    assert!(machine.files().iter().any(|f| f.contains("other-boot")), "{:?}", machine.files());
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 1);
    });
}

#[test]
fn an_empty_file_is_no_state() {
    let machine = Machine::new();
    std::fs::write(machine.store_path(), b"").expect("write");
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.create("c1").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn a_file_that_is_no_store_is_set_aside_with_a_message_and_the_agent_serves() {
    let machine = Machine::new();
    std::fs::write(machine.store_path(), b"this is not a database at all, but it is long enough to be one".repeat(200))
        .expect("write");
    machine.life(async |agent| {
        assert!(agent.set_aside.is_some());
        agent.create("c1").await;
        agent.assert_healthy().await;
    });
    assert!(machine.files().iter().any(|f| f.contains("damaged")), "{:?}", machine.files());
}

/// A row of the table of endpoints that is no record.
fn put_record(machine: &Machine, key: u16, bytes: &[u8]) {
    let database = Database::create(machine.store_path()).expect("open");
    let txn = database.begin_write().expect("begin");
    txn.open_table(ENDPOINTS).expect("table").insert(key, bytes).expect("insert");
    txn.commit().expect("commit");
}

#[test]
fn a_record_that_cannot_be_read_costs_no_other_endpoint_anything() {
    let machine = Machine::new();
    let before = machine.life(async |agent| agent.create("c1").await.shared.read(|v| v.record.clone()));
    put_record(&machine, 7, b"{\"id\":7");
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.quiet().await;
        assert_eq!(agent.handle(1).shared.read(|v| v.record.clone()), before);
        assert!(!agent.is_free(id(7)), "its endpoint may live");
        let findings = agent.findings(false).await;
        let [finding] = &findings[..] else { panic!("{findings:?}") };
        assert_eq!((finding.object.as_str(), finding.subject.as_str()), ("record", "7"));
        assert!(finding.problem.contains("cannot be read"), "{finding:?}");
        agent.create("c2").await;
        agent.delete(&agent.handle(1)).await;
    });
}

#[test]
fn a_record_under_another_endpoints_key_costs_the_other_nothing() {
    let machine = Machine::new();
    let record = machine.life(async |agent| agent.create("c1").await.shared.read(|v| v.record.clone()));
    put_record(&machine, 7, &serde_json::to_vec(&record).expect("encode"));
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.quiet().await;
        assert_eq!(agent.handle(1).shared.read(|v| v.record.clone()), record);
        assert!(agent.life.endpoints.registry.get(id(7)).is_none());
        let findings = agent.findings(false).await;
        assert!(findings.iter().any(|f| f.object == "record" && f.problem.contains("filed under 7")), "{findings:?}");
        assert_eq!(agent.kernel.observe_endpoint(&record).await.expect("observe"), []);
        agent.create("c2").await;
    });
}

#[test]
fn a_table_of_another_shape_sets_the_file_aside() {
    let machine = Machine::new();
    {
        let database = Database::create(machine.store_path()).expect("open");
        let txn = database.begin_write().expect("begin");
        let other: TableDefinition<u64, u64> = TableDefinition::new("meta");
        txn.open_table(other).expect("table").insert(1, 1).expect("insert");
        txn.commit().expect("commit");
    }
    machine.life(async |agent| {
        assert!(agent.set_aside.is_some());
        agent.create("c1").await;
    });
}

/// Every page in turn: whatever is hit, the agent starts with what is whole, or with nothing and a message; where the
/// damage makes redb itself panic, after three starts that ended over it.
#[test]
fn a_file_with_any_page_overwritten_does_not_keep_the_agent_down() {
    let whole = Machine::new();
    whole.life(async |agent| {
        agent.create("c1").await;
        agent.create("c2").await;
    });
    let bytes = std::fs::read(whole.store_path()).expect("read");
    let mut set_aside = 0;
    for page in (0..bytes.len().min(64 * 4096)).step_by(4096) {
        let machine = Machine::new();
        std::fs::write(machine.store_path(), &bytes).expect("write");
        let file = std::fs::OpenOptions::new().write(true).open(machine.store_path()).expect("open");
        file.write_all_at(&[0xa5; 4096], page as u64).expect("overwrite");
        let start = || {
            machine.life(async |agent| {
                assert!(agent.life.endpoints.registry.is_empty(), "the links of its endpoints are not there");
                agent.create("c3").await;
                agent.assert_healthy().await;
                agent.set_aside
            })
        };
        let starts = (0..4).find_map(|_| catch_unwind(AssertUnwindSafe(start)).ok());
        let aside = starts.unwrap_or_else(|| panic!("page at {page}: four starts failed"));
        set_aside += usize::from(aside.is_some());
    }
    assert!(set_aside > 0, "no page mattered");
}

#[test]
fn a_file_with_any_byte_of_its_header_changed_does_not_keep_the_agent_down() {
    let whole = Machine::new();
    whole.life(async |agent| {
        agent.create("c1").await;
    });
    let bytes = std::fs::read(whole.store_path()).expect("read");
    let mut set_aside = 0;
    // redb's magic number, its geometry, and both commit slots with the version of the file's format.
    for at in 0..320 {
        let machine = Machine::new();
        let mut changed = bytes.clone();
        changed[at] = if changed[at] == 2 { 3 } else { 2 };
        std::fs::write(machine.store_path(), changed).expect("write");
        let start = || {
            machine.life(async |agent| {
                agent.create("c3").await;
                agent.set_aside
            })
        };
        let starts = (0..4).find_map(|_| catch_unwind(AssertUnwindSafe(start)).ok());
        let aside = starts.unwrap_or_else(|| panic!("byte {at}: four starts failed"));
        set_aside += usize::from(aside.is_some());
    }
    assert!(set_aside > 0, "no byte mattered");
}

#[test]
fn reads_after_large_commits_are_not_taken_for_somebody_elses_writes() {
    let machine = Machine::new();
    let opened = wharf_store::Store::open(&machine.store_path(), &machine.boot_id).expect("open");
    let rests: Vec<_> = (0..2_048_u32)
        .map(|n| Rest {
            ip: std::net::Ipv4Addr::from(0x0a57_0100 + n).into(),
            pool: PoolName::parse("default").expect("pool"),
            last_owner: format!("a network/a container's id of some length {n:040}:eth0"),
            since_unix_ms: 0,
        })
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let store = &opened.store;
        for _ in 0..4 {
            for batch in rests.chunks(512) {
                store.commit(batch.iter().cloned().map(Change::PutRest).collect()).await.expect("put");
                assert!(!store.snapshot().await.expect("read").resting.is_empty());
            }
            for batch in rests.chunks(512) {
                store.commit(batch.iter().map(|r| Change::RemoveRest(r.ip)).collect()).await.expect("removed");
                store.snapshot().await.expect("read");
                store.ping().await.expect("as this process left it");
            }
        }
    });
    drop(opened.store);
    opened.writer.join().expect("the writer ends");
}

#[test]
fn a_store_over_which_three_starts_ended_is_set_aside_and_one_over_which_two_did_is_not() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
    });
    let marker = machine.store_path().with_extension("opening");
    std::fs::write(&marker, b"xx").expect("write");
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        assert_eq!(agent.life.endpoints.registry.len(), 1);
    });
    assert!(!marker.exists(), "a start that gets through wipes the slate");
    std::fs::write(&marker, b"xxx").expect("write");
    machine.life(async |agent| {
        let why = agent.set_aside.clone().expect("set aside");
        assert!(why.contains("every process that opens it"), "{why}");
        agent.create("c2").await;
        agent.assert_lost_but_living().await;
    });
}

#[test]
fn a_truncated_file_never_keeps_the_agent_down() {
    let whole = Machine::new();
    whole.life(async |agent| {
        agent.create("c1").await;
    });
    let bytes = std::fs::read(whole.store_path()).expect("read");
    for length in [1, 100, 4096, 8192, bytes.len() / 2, bytes.len() - 4096] {
        let machine = Machine::new();
        std::fs::write(machine.store_path(), &bytes[..length]).expect("write");
        machine.life(async |agent| {
            agent.create("c3").await;
            agent.assert_healthy().await;
        });
    }
}

#[test]
fn a_store_of_a_newer_agent_is_refused_and_not_a_byte_of_it_changes() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
    });
    put_meta(&machine, "schema", &99_u64.to_le_bytes());
    let before = std::fs::read(machine.store_path()).expect("read");
    for _ in 0..4 {
        let error = machine.try_life(async |_| ()).expect_err("refused");
        assert!(error.to_string().contains("schema is version 99, this agent knows 1 to 2"), "{error}");
    }
    assert_eq!(machine.files(), ["state.redb"], "not set aside");
    assert!(std::fs::read(machine.store_path()).expect("read") == before, "the file changed");
    put_meta(&machine, "schema", &2_u64.to_le_bytes());
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 1, "all is still in it");
    });
}

#[test]
fn a_store_of_the_version_before_is_migrated_with_all_that_is_in_it() {
    let machine = Machine::new();
    let (before, lease) = machine.life(async |agent| {
        let handle = agent.create("c1").await;
        let lease = agent.lease_to_caller("job 7").await;
        (handle.shared.read(|v| v.record.clone()), lease)
    });
    {
        // What version 1 wrote: the same tables without those that came with version 2.
        let database = Database::create(machine.store_path()).expect("open");
        let txn = database.begin_write().expect("begin");
        let rests: TableDefinition<&str, &[u8]> = TableDefinition::new("rests");
        txn.delete_table(rests).expect("delete table");
        for name in ["restore-failures", "quarantine"] {
            let table: TableDefinition<u16, &[u8]> = TableDefinition::new(name);
            txn.delete_table(table).expect("delete table");
        }
        txn.open_table(META).expect("table").insert("schema", 1_u64.to_le_bytes().as_slice()).expect("insert");
        txn.commit().expect("commit");
    }
    for life in 0..2 {
        machine.life(async |agent| {
            assert_eq!(agent.set_aside, None);
            agent.assert_healthy().await;
            assert_eq!(agent.handle(1).shared.read(|v| v.record.clone()), before);
            let snapshot = agent.snapshot().await;
            assert_eq!(snapshot.leases.len(), 3, "{:?}", snapshot.leases);
            assert_eq!(agent.lease_owner(lease.ip), Some(lease.owner.clone()));
            // And it takes what version 2 is there for.
            let handle = agent.create(&format!("new{life}")).await;
            agent.delete(&handle).await;
            assert_eq!(agent.snapshot().await.resting.len(), 2 * (life + 1));
        });
        assert_eq!(meta(&machine, "schema"), 2_u64.to_le_bytes());
    }
    machine.life(async |agent| {
        agent.delete(&agent.handle(1)).await;
        agent.assert_healthy().await;
    });
}

#[test]
fn an_epoch_never_comes_back() {
    let mut machine = Machine::new();
    let mut seen = BTreeSet::new();
    for life in 0..6 {
        // More than one block of epochs in some lives; a crash right after the first in others; another boot; damage.
        let many = if life % 2 == 0 { 10_000 } else { 1 };
        if life == 3 {
            machine.boot_id = "second boot".into();
        }
        machine.life(async |agent| {
            for _ in 0..many {
                let epoch = agent.life.store.next_epoch().await.expect("epoch");
                assert!(seen.insert(epoch), "epoch {epoch} came twice");
                assert!(seen.last() == Some(&epoch), "epochs grow");
            }
        });
    }
}

#[test]
fn an_epoch_that_the_kernel_still_knows_is_not_given_out_after_the_store_is_lost() {
    let machine = Machine::new();
    let last = machine.life(async |agent| {
        for _ in 0..50 {
            agent.life.store.next_epoch().await.expect("epoch");
        }
        agent.create("c1").await.epoch
    });
    std::fs::write(machine.store_path(), vec![0xa5; 65_536]).expect("overwrite");
    machine.life(async |agent| {
        assert!(agent.set_aside.is_some());
        let next = agent.create("c2").await.epoch;
        assert!(next > last, "{next} after {last}");
    });
}

#[test]
fn an_epoch_is_not_given_out_before_it_is_durable() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.disk.fill();
        let mut given = 0;
        while agent.life.store.next_epoch().await.is_ok() {
            given += 1;
        }
        assert!(given <= 4096, "{given} without a write");
        agent.disk.mend();
        agent.life.store.next_epoch().await.expect("after the disk is mended");
    });
}

#[test]
fn a_disk_that_was_full_for_a_while_does_not_cost_the_agent_its_store() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.disk.fill();
        agent.life.store.commit(vec![Change::RemoveIntent(id(9), wharf_core::ids::Epoch(9))]).await.expect_err("full");
        assert!(!agent.life.store.stats().healthy.load(std::sync::atomic::Ordering::Relaxed));
        agent.disk.mend();
        agent.create("c2").await;
        assert!(agent.life.store.stats().healthy.load(std::sync::atomic::Ordering::Relaxed));
        agent.assert_healthy().await;
    });
    machine.life(async |agent| {
        assert_eq!(agent.life.endpoints.registry.len(), 2);
        agent.assert_healthy().await;
    });
}

#[test]
fn a_store_that_another_agent_holds_is_refused() {
    let machine = Machine::new();
    let held = wharf_store::Store::open(&machine.store_path(), "boot").expect("open");
    let refused = wharf_store::Store::open(&machine.store_path(), "boot").err().expect("held");
    assert!(refused.to_string().contains("another agent has it open"), "{refused}");
    drop(held.store);
    held.writer.join().expect("ends");
}

/// What a machine has that only its store knows: an endpoint, a caller's lease, an address that rests, a life that
/// ended.
async fn fill(agent: &Agent) -> wharf_core::store::Snapshot {
    agent.create("c1").await;
    agent.lease_to_caller("job 7").await;
    let gone = agent.create("c0").await;
    agent.delete(&gone).await;
    agent.snapshot().await
}

async fn touch(agent: &Agent) -> Result<(), wharf_store::StoreError> {
    agent.life.store.commit(vec![Change::RemoveIntent(id(9), wharf_core::ids::Epoch(9))]).await
}

#[test]
fn a_store_that_is_removed_is_noticed_and_written_anew_with_every_record() {
    let machine = Machine::new();
    let before = machine.life(async |agent| {
        let before = fill(&agent).await;
        std::fs::remove_file(machine.store_path()).expect("remove");
        let refused = agent.try_create(agent.container("c2")).await.expect_err("its record would be lost");
        assert_eq!(refused.code, wharf_api::ErrorCode::Store, "{refused:?}");
        assert!(refused.message.contains("state.redb: the file was removed"), "{}", refused.message);
        assert!(agent.life.store.stats().rewritten_recently().is_some());
        assert_eq!(agent.snapshot().await, before);
        agent.create("c2").await;
        agent.assert_healthy().await;
        before
    });
    assert_eq!(machine.files(), ["state.redb"]);
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.quiet().await;
        assert_eq!(agent.life.endpoints.registry.len(), 2);
        let now = agent.snapshot().await;
        assert!(before.endpoints.iter().all(|r| now.endpoints.contains(r)), "{now:?}");
        assert!(before.leases.iter().all(|l| now.leases.contains(l)), "{now:?}");
        assert_eq!(now.resting, before.resting);
        assert_eq!(agent.life.store.lives().await.expect("read").0.len(), 4, "also those that ended");
        assert!(agent.create("c3").await.epoch.0 > 4_096, "epochs go on");
    });
}

#[test]
fn a_store_that_is_removed_is_noticed_though_nobody_writes() {
    let machine = Machine::new();
    machine.life(async |agent| {
        fill(&agent).await;
        // The whole run directory.
        std::fs::remove_dir_all(machine.store_path().parent().expect("directory")).expect("remove");
        agent.life.store.ping().await.expect_err("noticed");
        agent.life.store.ping().await.expect("written anew");
    });
    machine.life(async |agent| {
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 1);
    });
}

/// What somebody may do to the store's bytes without giving its name to another file: none of it is read again.
#[test]
fn a_store_that_somebody_writes_to_is_written_anew_from_memory() {
    type Harm = fn(&std::path::Path, &[u8]);
    let harms: [Harm; 3] = [
        |path, _| drop(std::fs::File::create(path).expect("truncate")),
        |path, _| std::fs::write(path, [0xa5; 1 << 16]).expect("write"),
        |path, earlier| std::fs::write(path, earlier).expect("write"),
    ];
    for harm in harms {
        let machine = Machine::new();
        machine.life(async |agent| {
            agent.create("earlier").await;
        });
        let earlier = std::fs::read(machine.store_path()).expect("read");
        let before = machine.life(async |agent| {
            let before = fill(&agent).await;
            harm(&machine.store_path(), &earlier);
            let refused = agent.try_create(agent.container("c2")).await.expect_err("its record would be lost");
            assert!(refused.message.contains("somebody else wrote to the file"), "{}", refused.message);
            assert_eq!(agent.snapshot().await, before);
            agent.create("c2").await;
            agent.write_timeline(0).await.expect("write");
            agent.assert_healthy().await;
            // The last look is at the very end.
            harm(&machine.store_path(), &earlier);
            agent.snapshot().await
        });
        assert_eq!(machine.files(), ["state.redb"]);
        machine.life(async |agent| {
            assert_eq!(agent.set_aside, None);
            agent.quiet().await;
            assert_eq!(agent.life.endpoints.registry.len(), 3);
            let now = agent.snapshot().await;
            assert_eq!(
                (&now.endpoints, &now.leases, &now.resting),
                (&before.endpoints, &before.leases, &before.resting)
            );
            let epoch = agent.create("c3").await.epoch;
            assert!(before.endpoints.iter().all(|r| r.epoch < epoch), "epochs go on");
        });
    }
}

#[test]
fn the_timeline_of_those_that_live_is_written_again_after_somebody_wrote_to_the_store() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let endpoint = agent.create("c1").await;
        agent.write_timeline(0).await.expect("write");
        std::fs::write(machine.store_path(), b"").expect("truncate");
        agent.life.store.ping().await.expect_err("noticed");
        agent.write_timeline(0).await.expect("write");
        let lives = agent.life.store.lives().await.expect("read").0;
        assert!(lives.iter().any(|l| l.who.epoch == endpoint.epoch), "{lives:?}");
    });
}

#[test]
fn a_link_to_the_file_or_another_mode_is_no_change_of_the_store() {
    let machine = Machine::new();
    machine.life(async |agent| {
        fill(&agent).await;
        std::fs::hard_link(machine.store_path(), machine.store_path().with_extension("link")).expect("link");
        std::fs::set_permissions(machine.store_path(), std::os::unix::fs::PermissionsExt::from_mode(0o640))
            .expect("mode");
        touch(&agent).await.expect("nothing was lost");
    });
}

#[test]
fn what_is_no_regular_file_is_put_aside_at_a_start() {
    let machine = Machine::new();
    nix::unistd::mkfifo(&machine.store_path(), nix::sys::stat::Mode::S_IRWXU).expect("make");
    machine.life(async |agent| {
        assert!(agent.set_aside.as_ref().is_some_and(|a| a.contains("not a regular file")), "{:?}", agent.set_aside);
        agent.create("c1").await;
        agent.assert_healthy().await;
    });
}

#[test]
fn another_file_in_the_place_of_the_store_is_put_aside_and_not_written_to() {
    let machine = Machine::new();
    machine.life(async |agent| {
        fill(&agent).await;
        std::fs::rename(machine.store_path(), machine.store_path().with_extension("stolen")).expect("move");
        std::fs::write(machine.store_path(), b"somebody's").expect("write");
        let refused = touch(&agent).await.expect_err("noticed").to_string();
        assert!(refused.contains("was replaced by another"), "{refused}");
        touch(&agent).await.expect("written anew");
    });
    let aside = machine.files().into_iter().find(|f| f.contains("foreign")).expect("it is put aside");
    let aside = std::fs::read(machine.store_path().with_file_name(aside)).expect("read");
    assert_eq!(aside, b"somebody's");
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.assert_healthy().await;
        assert_eq!(agent.life.endpoints.registry.len(), 1);
    });
}

#[test]
fn a_store_in_the_place_of_the_store_that_another_process_uses_is_left_alone() {
    let machine = Machine::new();
    machine.life(async |agent| {
        fill(&agent).await;
        std::fs::remove_file(machine.store_path()).expect("remove");
        let other = Database::create(machine.store_path()).expect("make");
        for _ in 0..2 {
            let refused = touch(&agent).await.expect_err("it cannot be written anew").to_string();
            assert!(refused.contains("another process has the file"), "{refused}");
        }
        drop(other);
        touch(&agent).await.expect_err("noticed");
        touch(&agent).await.expect("written anew");
    });
}

#[test]
fn a_store_that_is_removed_while_the_disk_is_full_is_written_anew_when_there_is_room() {
    let machine = Machine::new();
    let before = machine.life(async |agent| {
        let before = fill(&agent).await;
        agent.disk.fill();
        touch(&agent).await.expect_err("full");
        std::fs::remove_file(machine.store_path()).expect("remove");
        for _ in 0..2 {
            let refused = touch(&agent).await.expect_err("still full").to_string();
            assert!(refused.contains("was removed") && refused.contains("cannot be written anew"), "{refused}");
        }
        agent.disk.mend();
        agent.life.store.ping().await.expect_err("noticed");
        assert_eq!(agent.snapshot().await, before);
        before
    });
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.quiet().await;
        assert_eq!(agent.snapshot().await.leases, before.leases);
    });
}

#[test]
fn an_agent_that_died_before_the_new_file_had_its_name_loses_nothing() {
    let machine = Machine::new();
    let before = machine.life(async |agent| fill(&agent).await);
    let new = machine.store_path().with_extension("redb.new");
    std::fs::rename(machine.store_path(), &new).expect("rename");
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        agent.quiet().await;
        assert_eq!(agent.snapshot().await.leases, before.leases);
    });
    // Beside a store that is there, it is what was left of an attempt.
    std::fs::write(&new, b"half a copy").expect("write");
    machine.life(async |agent| {
        agent.quiet().await;
        assert_eq!(agent.snapshot().await.leases, before.leases);
    });
    assert_eq!(machine.files(), ["state.redb"]);
}

#[test]
fn ended_lives_cost_two_kib_each_and_what_is_forgotten_gives_its_room_back() {
    const LIVES: u64 = 4_096;
    let machine = Machine::new();
    // What was never written to takes no room.
    let size = || std::fs::metadata(machine.store_path()).expect("the store").blocks() * 512;
    machine.life(async |agent| {
        let store = &agent.life.store;
        let first = agent.create("c1").await;
        let mut life = first.shared.life(None);
        let steps: Vec<_> = life.entries.list().to_vec();
        // As many steps as a create and a delete have, under the names that a kubelet gives.
        for entry in steps.iter().cycle().take(12) {
            life.entries.push(entry.clone());
        }
        life.who.attachment.container_id =
            wharf_core::ids::ContainerId::parse(&"0123456789abcdef".repeat(4)).expect("container id");
        life.who.pod_name = Some("a-deployment-of-some-service-7d4b9c5f6d-x2x7q".into());
        life.who.pod_namespace = Some("a-namespace-of-a-tenant".into());
        life.ended = Some(wharf_core::timeline::Ended { at_unix_ms: 1, how: wharf_core::timeline::End::Deleted });
        life.trim();
        let begun = size();
        for epoch in 0..LIVES {
            // Ids come again and again.
            (life.who.id, life.who.epoch) =
                (id(u16::try_from(epoch % 300 + 1).expect("id")), wharf_core::ids::Epoch(epoch));
            store.commit(vec![Change::PutLife(Box::new(life.clone()))]).await.expect("commit");
        }
        let each = (size() - begun) / LIVES;
        assert!(each <= 2_048, "{each} bytes for each life");
        for batch in 0..8 {
            let gone = (0..LIVES).skip(batch * 512).take(512).map(|epoch| {
                Change::RemoveLife(id(u16::try_from(epoch % 300 + 1).expect("id")), wharf_core::ids::Epoch(epoch))
            });
            store.commit(gone.collect()).await.expect("commit");
        }
        // The store is compacted after the last answer. Files of up to 2 MiB are not compacted.
        eventually("the file shrinks", || size() <= 2 << 20).await;
        agent.assert_healthy().await;
    });
    machine.life(async |agent| {
        assert_eq!(agent.set_aside, None);
        assert_eq!(agent.life.endpoints.registry.len(), 1);
        agent.assert_healthy().await;
    });
}
