use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt as _, os::unix::fs::symlink};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

fn queue() -> (TempDir, Queue) {
    let dir = TempDir::new().unwrap();
    let queue = Queue::new(dir.path());
    (dir, queue)
}

fn deletion(container_id: &str) -> Deletion {
    Deletion {
        version: VERSION,
        network: "net".into(),
        container_id: container_id.into(),
        ifname: "eth0".into(),
        endpoint: Some(EndpointRef { id: 7, epoch: 42 }),
        boot_id: "3b3b1f0e-9a57-4a52-8b52-111111111111".into(),
        written_unix_ms: 1_000,
        canary: None,
    }
}

fn canary(nonce: &str) -> Deletion {
    Deletion { endpoint: None, canary: Some(nonce.into()), ..deletion("canary") }
}

fn only(queue: &Queue) -> Entry {
    let mut entries = queue.list().unwrap();
    assert_eq!(entries.len(), 1, "{entries:?}");
    entries.remove(0)
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(path).unwrap().map(|item| item.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn what_is_put_is_listed_and_what_is_removed_is_not() {
    let (_dir, queue) = queue();
    assert_eq!(queue.list().unwrap(), [], "no directory is an empty queue");
    assert!(!queue.contains("net", "c1", "eth0"));
    let name = queue.put(&deletion("c1")).unwrap();
    assert_eq!(name, Queue::file_name("net", "c1", "eth0"));
    assert!(queue.contains("net", "c1", "eth0") && !queue.contains("net", "c1", "eth1"));
    assert_eq!(only(&queue), Entry { name: name.clone(), written_unix_ms: 1_000, content: Ok(deletion("c1")) });
    assert_eq!((mode(queue.path()), mode(&queue.path().join(&name))), (0o700, 0o600));
    queue.remove(&name).unwrap();
    queue.remove(&name).unwrap();
    assert!(!queue.contains("net", "c1", "eth0"));
    assert_eq!(names(queue.path()), [""; 0], "nothing temporary is left either");
}

#[test]
fn the_run_directory_is_made_and_a_lax_mode_corrected() {
    let dir = TempDir::new().unwrap();
    let queue = Queue::of_socket(&dir.path().join("a/b/wharf.sock"));
    queue.ensure_directory().unwrap();
    assert_eq!(queue.path(), dir.path().join("a/b/deletions"));
    assert_eq!((mode(queue.run_dir()), mode(queue.path())), (0o755, 0o700));
    fs::set_permissions(queue.path(), Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(queue.run_dir(), Permissions::from_mode(0o750)).unwrap();
    queue.ensure_directory().unwrap();
    assert_eq!((mode(queue.run_dir()), mode(queue.path())), (0o750, 0o700), "the agent's own mode stays");
}

#[test]
fn a_path_that_is_no_directory_is_refused_and_left_alone() {
    let (dir, queue) = queue();
    let elsewhere = TempDir::new().unwrap();
    symlink(elsewhere.path(), queue.path()).unwrap();
    for step in 0..2 {
        let put = queue.put(&deletion("c1")).unwrap_err();
        assert!(matches!(put, QueueError::NotADirectory { .. }), "{put}");
        assert!(matches!(queue.list(), Err(QueueError::NotADirectory { .. })));
        assert!(matches!(queue.sweep(Duration::ZERO), Err(QueueError::NotADirectory { .. })));
        if step == 0 {
            fs::remove_file(queue.path()).unwrap();
            fs::write(queue.path(), "a file").unwrap();
        }
    }
    assert_eq!(names(elsewhere.path()), [""; 0]);
    assert_eq!(names(dir.path()), [DIRECTORY]);
}

#[test]
fn a_second_delete_of_an_attachment_is_the_same_record() {
    let (_dir, queue) = queue();
    queue.put(&deletion("c1")).unwrap();
    let later = Deletion { written_unix_ms: 5_000, endpoint: None, ..deletion("c1") };
    queue.put(&later).unwrap();
    assert_eq!(only(&queue).content, Ok(Deletion { written_unix_ms: 1_000, ..later.clone() }));
    // A clock that was set back.
    queue.put(&Deletion { written_unix_ms: 10, ..later.clone() }).unwrap();
    assert_eq!(only(&queue).written_unix_ms, 10);
    // Times of different boots are not compared.
    let reboot = Deletion { boot_id: "another".into(), written_unix_ms: 9_000, ..later };
    queue.put(&reboot).unwrap();
    assert_eq!(only(&queue).content, Ok(reboot));
}

#[test]
fn a_canary_has_a_file_of_its_own() {
    let (_dir, queue) = queue();
    queue.put(&deletion("canary")).unwrap();
    let first = queue.put(&canary("one")).unwrap();
    assert_eq!(queue.put(&canary("one")).unwrap(), first);
    assert_ne!(queue.put(&canary("two")).unwrap(), first);
    assert_eq!(queue.list().unwrap().len(), 3);
}

#[test]
fn names_that_run_together_do_not_meet() {
    let all = [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("abc", "d", ""), ("", "abc", "d")];
    for (i, a) in all.iter().enumerate() {
        for (j, b) in all.iter().enumerate() {
            assert_eq!(i == j, Queue::file_name(a.0, a.1, a.2) == Queue::file_name(b.0, b.1, b.2));
        }
    }
    assert!(Queue::file_name(&"n".repeat(253), &"c".repeat(253), "eth0").len() < 80);
    // The name is on disk across upgrades, so it must not change.
    let known = Queue::file_name("net", "c1", "eth0");
    assert_eq!(known, "d82e556d8b06184e6cf9594c87d8ea65b5b61fd2f590d7073ea8107a092126ef.json");
}

#[test]
fn oldest_first() {
    let (_dir, queue) = queue();
    for (container_id, written_unix_ms) in [("c1", 300), ("c2", 100), ("c3", 200)] {
        queue.put(&Deletion { written_unix_ms, ..deletion(container_id) }).unwrap();
    }
    let order: Vec<String> = queue.list().unwrap().into_iter().map(|e| e.content.unwrap().container_id).collect();
    assert_eq!(order, ["c2", "c3", "c1"]);
}

#[test]
fn a_record_that_breaks_a_rule_is_neither_written_nor_read() {
    let (_dir, queue) = queue();
    let good = deletion("c1");
    for (bad, words) in [
        (Deletion { version: 2, ..good.clone() }, "version 2"),
        (Deletion { network: "../x".into(), ..good.clone() }, "network"),
        (Deletion { network: String::new(), ..good.clone() }, "network"),
        (Deletion { container_id: "c".repeat(254), ..good.clone() }, "container id"),
        (Deletion { container_id: "a/b".into(), ..good.clone() }, "container id"),
        (Deletion { ifname: "sixteen-bytes-xx".into(), ..good.clone() }, "interface name"),
        (Deletion { ifname: "..".into(), ..good.clone() }, "interface name"),
        (Deletion { boot_id: String::new(), ..good.clone() }, "boot id"),
        (Deletion { boot_id: "a\nb".into(), ..good.clone() }, "boot id"),
        (Deletion { boot_id: "b".repeat(65), ..good.clone() }, "boot id"),
        (Deletion { endpoint: Some(EndpointRef { id: 0, epoch: 1 }), ..good.clone() }, "endpoint id"),
        (Deletion { endpoint: Some(EndpointRef { id: 16_384, epoch: 1 }), ..good.clone() }, "endpoint id"),
        (Deletion { canary: Some(String::new()), ..good.clone() }, "canary"),
    ] {
        let refused = queue.put(&bad).unwrap_err();
        assert!(matches!(&refused, QueueError::Invalid { why } if why.to_string().contains(words)), "{refused}");
        queue.ensure_directory().unwrap();
        let name = bad.file_name();
        fs::write(queue.path().join(&name), serde_json::to_vec(&bad).unwrap()).unwrap();
        let why = only(&queue).content.unwrap_err().to_string();
        assert!(why.contains(words), "{why}");
        fs::remove_file(queue.path().join(&name)).unwrap();
    }
    assert_eq!(names(queue.path()), [""; 0]);
}

#[test]
fn the_largest_record_that_may_be_is_within_the_bound() {
    let (_dir, queue) = queue();
    let largest = Deletion {
        network: "n".repeat(253),
        container_id: "c".repeat(253),
        ifname: "\"".repeat(15),
        endpoint: Some(EndpointRef { id: wharf_names::ids::MAX_ENDPOINT_ID, epoch: u64::MAX }),
        boot_id: "\\".repeat(64),
        written_unix_ms: u64::MAX,
        canary: Some("\"".repeat(64)),
        version: VERSION,
    };
    let name = queue.put(&largest).unwrap();
    assert_eq!(only(&queue).content, Ok(largest));
    assert!(fs::metadata(queue.path().join(name)).unwrap().len() < MAX_RECORD_BYTES / 4);
}

#[test]
fn a_record_cut_off_anywhere_is_unusable_and_can_be_set_aside() {
    let (_dir, queue) = queue();
    let name = queue.put(&deletion("c1")).unwrap();
    let path = queue.path().join(&name);
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        let entry = only(&queue);
        assert!(entry.content.is_err(), "cut at {length}: {entry:?}");
        assert!(entry.written_unix_ms > 1_000, "the file's own time: {entry:?}");
    }
    queue.set_aside(&name).unwrap();
    assert_eq!(queue.list().unwrap(), []);
    assert!(!queue.contains("net", "c1", "eth0"));
    assert_eq!(names(&queue.path().join(BAD)).len(), 1);
    queue.set_aside(&name).unwrap();
    fs::write(&path, b"{").unwrap();
    queue.put(&deletion("c1")).unwrap();
    assert_eq!(only(&queue).content, Ok(deletion("c1")));
}

#[test]
fn whatever_else_lies_there_is_named_and_never_followed_or_waited_for() {
    let (dir, queue) = queue();
    let good = queue.put(&deletion("c1")).unwrap();
    let secret = dir.path().join("elsewhere.json");
    fs::copy(queue.path().join(&good), &secret).unwrap();
    let at = |container_id: &str| queue.path().join(Queue::file_name("net", container_id, "eth0"));
    symlink(&secret, at("link")).unwrap();
    symlink(dir.path().join("nowhere"), at("dangling")).unwrap();
    fs::create_dir(at("directory")).unwrap();
    fs::write(at("directory").join("inside"), "x").unwrap();
    let made = std::process::Command::new("mkfifo").arg(at("pipe")).status().unwrap();
    assert!(made.success());
    drop(std::os::unix::net::UnixListener::bind(queue.path().join("socket")).unwrap());
    // Another attachment's record under this name.
    fs::copy(&secret, at("liar")).unwrap();
    fs::copy(&secret, queue.path().join("liar")).unwrap();
    fs::write(at("huge"), vec![b' '; usize::try_from(MAX_RECORD_BYTES).unwrap() + 1]).unwrap();
    fs::write(at("deep"), "[".repeat(8_000)).unwrap();
    fs::write(queue.path().join(OsStr::from_bytes(b"\xff\xfe")), "x").unwrap();

    let entries = queue.list().unwrap();
    let (usable, unusable): (Vec<_>, Vec<_>) = entries.into_iter().partition(|e| e.content.is_ok());
    assert_eq!(usable.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(), [&good]);
    assert_eq!(unusable.len(), 9, "{unusable:?}");
    for container_id in ["link", "dangling", "directory", "pipe"] {
        assert!(at(container_id).symlink_metadata().is_ok());
        assert!(!queue.contains("net", container_id, "eth0"), "{container_id}");
    }
    for entry in unusable {
        queue.set_aside(&entry.name).unwrap();
    }
    assert_eq!(queue.sweep(Duration::from_secs(3600)).unwrap(), 1, "the name that is no text");
    assert_eq!(names(queue.path()), {
        let mut all = vec![good, BAD.to_owned()];
        all.sort();
        all
    });
    assert_eq!(names(&queue.path().join(BAD)).len(), 10);
    assert!(secret.is_file(), "what a link names is not touched");
    fs::create_dir(at("directory")).unwrap();
    queue.put(&deletion("directory")).unwrap();
    assert!(queue.contains("net", "directory", "eth0"));
}

#[test]
fn only_the_last_unusable_files_are_kept() {
    let (_dir, queue) = queue();
    queue.ensure_directory().unwrap();
    fs::write(queue.path().join(BAD), "somebody's").unwrap();
    for n in 0..MAX_BAD + 5 {
        let name = format!("file-{n}-{}", "é".repeat(100));
        if n == 0 {
            fs::create_dir_all(queue.path().join(&name).join("deeper")).unwrap();
        } else {
            fs::write(queue.path().join(&name), "x").unwrap();
        }
        queue.set_aside(&name).unwrap();
        if n == 0 {
            let contents = queue.aside().unwrap().into_iter().filter_map(|path| fs::read(path).ok());
            assert_eq!(contents.collect::<Vec<_>>(), [b"somebody's"]);
        }
    }
    let kept = names(&queue.path().join(BAD));
    assert_eq!(kept.len(), MAX_BAD);
    assert!(kept.iter().any(|name| name.contains(&format!("file-{}-", MAX_BAD + 4))), "the newest stays: {kept:?}");
    assert_eq!(names(queue.path()), [BAD]);
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    let (dir, queue) = queue();
    queue.ensure_directory().unwrap();
    let outside = dir.path().join("outside");
    fs::write(&outside, "x").unwrap();
    for name in ["", ".", "..", "../outside", "a/b", "/etc/passwd", "a\0b", BAD] {
        assert!(matches!(queue.remove(name), Err(QueueError::Name { .. })), "{name:?}");
        assert!(matches!(queue.set_aside(name), Err(QueueError::Name { .. })), "{name:?}");
    }
    assert!(outside.is_file());
    let nowhere = Queue::new(&dir.path().join("nowhere"));
    nowhere.remove("a").unwrap();
    assert_eq!(nowhere.sweep(Duration::ZERO).unwrap(), 0);
    assert!(!nowhere.run_dir().exists());
}

#[test]
fn a_full_queue_refuses_new_attachments_only() {
    let (_dir, queue) = queue();
    queue.put(&deletion("first")).unwrap();
    fs::create_dir(queue.path().join(BAD)).unwrap();
    fs::write(queue.path().join(".tmp-left"), "x").unwrap();
    for n in 1..MAX_RECORDS {
        fs::write(queue.path().join(format!("{n:064x}.json")), "x").unwrap();
    }
    let refused = queue.put(&deletion("next")).unwrap_err();
    assert!(matches!(refused, QueueError::Full { .. }), "{refused}");
    assert!(refused.problem().contains("4096 records") && refused.hint().contains("wharf-agent"), "{refused}");
    queue.put(&Deletion { endpoint: None, ..deletion("first") }).unwrap();
    queue.remove(&format!("{:064x}.json", 1)).unwrap();
    queue.put(&deletion("next")).unwrap();
    assert_eq!(names(queue.path()).len(), MAX_RECORDS + 2, "no temporary file is left of the refused");
}

#[test]
fn a_look_at_a_flooded_directory_is_bounded() {
    let (_dir, queue) = queue();
    queue.ensure_directory().unwrap();
    for n in 0..=MAX_LOOKED_AT {
        fs::write(queue.path().join(format!("{n}")), "").unwrap();
    }
    assert_eq!(queue.list().unwrap().len(), MAX_LOOKED_AT);
}

#[test]
fn the_leftovers_of_killed_writers_are_swept_when_they_are_old() {
    let (_dir, queue) = queue();
    let name = queue.put(&deletion("c1")).unwrap();
    fs::write(queue.path().join(".tmp-1"), "half of a rec").unwrap();
    fs::create_dir(queue.path().join(".tmp-2")).unwrap();
    let hour_ago = SystemTime::now() - Duration::from_secs(3600);
    for left in [".tmp-1", ".tmp-2"] {
        File::open(queue.path().join(left)).unwrap().set_modified(hour_ago).unwrap();
    }
    fs::write(queue.path().join(".tmp-3"), "being written").unwrap();
    assert_eq!(queue.list().unwrap().len(), 1, "they are nobody's record");
    assert_eq!(queue.sweep(Duration::from_secs(60)).unwrap(), 2);
    assert_eq!(names(queue.path()), [".tmp-3".to_owned(), name]);
}

#[test]
fn writers_at_once_leave_one_whole_record() {
    let (_dir, queue) = queue();
    std::thread::scope(|scope| {
        for writer in 0..8_u64 {
            let queue = queue.clone();
            scope.spawn(move || {
                for round in 0..50 {
                    queue.put(&Deletion { written_unix_ms: 1_000 + writer * 50 + round, ..deletion("c1") }).unwrap();
                    assert!(only(&queue).content.is_ok());
                }
            });
        }
    });
    // Either racing writer's time may win.
    assert!((1_000..1_400).contains(&only(&queue).written_unix_ms));
    assert_eq!(names(queue.path()).len(), 1);
}

#[test]
fn puts_and_removes_at_once_end_in_peace() {
    let (_dir, queue) = queue();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (writer, remover) = (queue.clone(), queue.clone());
            scope.spawn(move || (0..50).for_each(|_| drop(writer.put(&deletion("c1")).unwrap())));
            scope.spawn(move || {
                (0..50).for_each(|_| {
                    for entry in remover.list().unwrap() {
                        assert!(entry.content.is_ok(), "{entry:?}");
                        remover.remove(&entry.name).unwrap();
                    }
                });
            });
        }
    });
    assert!(queue.list().unwrap().len() <= 1);
}

#[test]
fn errors_name_operation_subject_cause_and_a_way_out() {
    let failed = QueueError::Io {
        operation: "write deletion record",
        path: "/run/wharf/deletions/.tmp-1".into(),
        cause: io::ErrorKind::StorageFull.into(),
    };
    assert_eq!(
        failed.to_string(),
        "write deletion record /run/wharf/deletions/.tmp-1: no storage space (free space on that file system)"
    );
}

proptest! {
    #[test]
    fn any_bytes_are_a_record_or_unusable(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let (_dir, queue) = queue();
        queue.ensure_directory().unwrap();
        let name = Queue::file_name("net", "c1", "eth0");
        fs::write(queue.path().join(&name), &bytes).unwrap();
        prop_assert!(only(&queue).content.is_err());
        queue.set_aside(&name).unwrap();
        prop_assert_eq!(queue.list().unwrap(), []);
    }

    #[test]
    fn a_changed_byte_gives_a_valid_record_of_that_name_or_none(at in any::<prop::sample::Index>(), to: u8) {
        let (_dir, queue) = queue();
        let name = queue.put(&deletion("c1")).unwrap();
        let path = queue.path().join(&name);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = to;
        fs::write(&path, &bytes).unwrap();
        if let Ok(record) = only(&queue).content {
            prop_assert_eq!(record.file_name(), name);
            prop_assert_eq!(record.check(), Ok(()));
            prop_assert_eq!((record.container_id.as_str(), record.ifname.as_str()), ("c1", "eth0"));
        }
    }

    #[test]
    fn what_is_valid_comes_back_as_it_was(
        network in "[a-z0-9][a-zA-Z0-9_.-]{0,80}", container_id in "[a-z0-9][a-z0-9_.-]{0,252}",
        ifname in "[^\\s/:%\\p{Cc}]{1,5}", id in 1..=wharf_names::ids::MAX_ENDPOINT_ID, epoch: u64, written_unix_ms: u64, known: bool,
    ) {
        let endpoint = known.then_some(EndpointRef { id, epoch });
        let wanted = Deletion { network, container_id, ifname, endpoint, written_unix_ms, ..deletion("c1") };
        let (_dir, queue) = queue();
        // Names that are only dots, or reserved by the kernel.
        prop_assume!(wanted.check().is_ok());
        queue.put(&wanted).unwrap();
        prop_assert!(queue.contains(&wanted.network, &wanted.container_id, &wanted.ifname));
        prop_assert_eq!(only(&queue).content, Ok(wanted));
    }

    #[test]
    fn hostile_json_is_refused_without_harm(key in "version|network|endpoint|boot_id|extra", value in "null|true|-1|1e99|\"\"|\\[\\]|\\{\\}|4294967297|\"\\\\ud800\"") {
        let record = serde_json::to_string(&deletion("c1")).unwrap();
        let text = record.replacen('{', &format!("{{\"{key}\":{value},"), 1);
        prop_assert!(Deletion::parse(text.as_bytes()).is_err(), "{}", text);
    }
}
