use std::{
    collections::BTreeMap,
    os::unix::fs::{PermissionsExt as _, symlink},
    sync::mpsc,
    thread,
};

use tempfile::TempDir;

use super::*;
use crate::record::{Identity, Netns, Phase};

fn store() -> (TempDir, Store, SandboxName) {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::new(&directory.path().join("sandboxes"));
    store.ensure().unwrap();
    (directory, store, "web".parse().unwrap())
}

fn record(name: &SandboxName) -> Record {
    Record {
        version: crate::record::VERSION,
        name: name.clone(),
        container_id: wharf_names::ids::ContainerId::parse("web-1").unwrap(),
        created_unix_ms: 1,
        boot_id: "boot".to_owned(),
        phase: Phase::Ready,
        problem: None,
        netns: Netns { path: "/run/netns/web".into(), identity: Identity { dev: 4, inode: 5, cookie: 6 } },
        labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]),
        attachments: Vec::new(),
        processes: Vec::new(),
    }
}

fn files(store: &Store) -> Vec<String> {
    let listing = fs::read_dir(&store.directory).unwrap();
    let mut names: Vec<String> = listing.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_record_comes_back_as_it_was_and_only_root_reads_it() {
    let (_directory, store, name) = store();
    let lock = store.lock(&name, |_| ()).unwrap();
    assert_eq!(store.load(&name).unwrap(), None);
    store.save(&record(&name)).unwrap();
    assert_eq!(store.load(&name).unwrap(), Some(record(&name)));
    assert_eq!(store.names().unwrap(), std::slice::from_ref(&name));
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!((mode(&store.directory), mode(&store.path(&name, "json"))), (0o700, 0o600));
    store.remove(&name, lock).unwrap();
    assert_eq!((files(&store), store.is_known(&name).unwrap()), (Vec::new(), false));
}

#[test]
fn a_record_that_cannot_be_used_is_told_with_its_file() {
    let (_directory, store, name) = store();
    let whole = serde_json::to_string(&record(&name)).unwrap();
    let half = &whole[..whole.len() / 2];
    let other = whole.replace("\"name\":\"web\"", "\"name\":\"db\"");
    let newer = whole.replace("\"version\":1", "\"version\":2");
    let more = whole.replace("{\"version\"", "{\"more\":1,\"version\"");
    let elsewhere = whole.replace("/run/netns/web", "/etc/hostname");
    let relative = whole.replace("/run/netns/web", "../netns/web");
    for (text, why) in [
        ("", "it is empty"),
        (half, "EOF"),
        ("[]", "no version"),
        ("null", "no version"),
        ("{\"version\":1}", "missing field"),
        (other.as_str(), "it is the record of db"),
        (newer.as_str(), "its version is 2"),
        (more.as_str(), "unknown field"),
        (elsewhere.as_str(), "its namespace is at /etc/hostname"),
        (relative.as_str(), "its namespace is at ../netns/web"),
    ] {
        let path = store.path(&name, "json");
        fs::write(&path, text).unwrap();
        let error = store.load(&name).unwrap_err();
        assert!(matches!(error, SandboxError::Damaged { .. }), "{text}: {error}");
        let told = error.to_string();
        assert!(told.contains(why) && told.contains(&path.display().to_string()), "{text:?}: {told}");
        assert!(error.hint().unwrap().contains("--force"), "{text}");
    }
}

#[test]
fn a_directory_that_was_there_keeps_its_mode_unless_others_may_write_to_it() {
    let directory = tempfile::tempdir().unwrap();
    let (store, name) = (Store::new(directory.path()), "web".parse().unwrap());
    let set = |mode| fs::set_permissions(directory.path(), fs::Permissions::from_mode(mode)).unwrap();
    for (mode, is_safe) in
        [(0o700, true), (0o755, true), (0o750, true), (0o770, false), (0o702, false), (0o1777, false)]
    {
        set(mode);
        store.ensure().unwrap();
        let locked = store.lock(&name, |_| ());
        assert_eq!(locked.is_ok(), is_safe, "{mode:o}");
        assert_eq!(fs::metadata(directory.path()).unwrap().mode() & 0o7777, mode);
        if let Err(error) = locked {
            assert!(error.to_string().contains(&format!("by its mode {mode:04o}")), "{error}");
            assert!(error.hint().unwrap().contains("chmod go-w"));
        }
    }
    set(0o700);
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(directory.path(), Some(4711), None).unwrap();
        let error = store.lock(&name, |_| ()).unwrap_err().to_string();
        assert!(error.contains("user 4711 owns it"), "{error}");
    }
}

#[test]
fn what_is_no_file_in_a_records_place_is_told_and_not_opened() {
    let (_directory, store, name) = store();
    let path = store.path(&name, "json");
    let told = || store.load(&name).unwrap_err().to_string();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(told().ends_with("it is a FIFO"), "{}", told());
    let lock = store.lock(&name, |_| ()).unwrap();
    store.remove(&name, lock).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(told().ends_with("it is a directory"), "{}", told());
    let lock = store.lock(&name, |_| ()).unwrap();
    let error = store.remove(&name, lock).unwrap_err();
    assert!(error.hint().unwrap().contains(&format!("rm -r {}", path.display())), "{error}");
    assert!(path.is_dir());
}

#[test]
fn a_writer_that_died_leaves_the_record_before() {
    let (_directory, store, name) = store();
    store.save(&record(&name)).unwrap();
    fs::write(store.path(&name, "new"), "{\"version\"").unwrap();
    assert_eq!(store.load(&name).unwrap(), Some(record(&name)));
    let later = Record { phase: Phase::Stopping, ..record(&name) };
    store.save(&later).unwrap();
    assert_eq!(store.load(&name).unwrap(), Some(later));
    assert_eq!(files(&store), ["web.json"]);
}

#[test]
fn a_link_in_a_records_place_is_not_followed() {
    let (directory, store, name) = store();
    let target = directory.path().join("target");
    fs::write(&target, "untouched").unwrap();
    for suffix in ["json", "new", "lock"] {
        symlink(&target, store.path(&name, suffix)).unwrap();
    }
    assert!(store.load(&name).is_err());
    assert!(store.save(&record(&name)).is_err());
    assert!(store.lock(&name, |_| ()).is_err());
    assert_eq!(fs::read_to_string(&target).unwrap(), "untouched");
}

#[test]
fn a_lock_is_one_holders_and_is_free_again_after_a_remove() {
    let (_directory, store, name) = store();
    let held = store.lock(&name, |_| ()).unwrap();
    assert!(store.is_locked(&name));
    let (told, waits) = mpsc::channel();
    thread::scope(|s| {
        let waiter = s.spawn(|| store.lock(&name, |text| told.send(text.to_owned()).unwrap()).map(drop));
        let text = waits.recv().unwrap();
        assert!(text.contains(&std::process::id().to_string()) && text.contains("sandbox web"), "{text}");
        assert!(!waiter.is_finished());
        // The waiter has the unlinked file open.
        store.remove(&name, held).unwrap();
        waiter.join().unwrap().unwrap();
    });
    assert_eq!(files(&store), ["web.lock"]);
    assert!(!store.is_locked(&name));
}

#[test]
fn a_lock_that_stays_held_is_told_with_its_holder() {
    let (_directory, store, name) = store();
    let held = store.lock(&name, |_| ()).unwrap();
    let error = store.lock_within(Duration::from_millis(50), &name, |_| ()).unwrap_err();
    assert!(matches!(error, SandboxError::Busy { .. }), "{error}");
    assert!(error.to_string().contains(&format!("process {},", std::process::id())), "{error}");
    drop(held);
    store.lock_within(Duration::ZERO, &name, |_| ()).unwrap();
}

#[test]
fn other_files_are_no_sandboxes() {
    let (_directory, store, name) = store();
    store.save(&record(&name)).unwrap();
    for stray in ["notes.txt", ".json", "a b.json", "web.json~", "x.new"] {
        fs::write(store.directory.join(stray), "").unwrap();
    }
    assert_eq!(store.names().unwrap(), [name]);
}
