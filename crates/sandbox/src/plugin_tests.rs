//! Chains of fake plugins that record their calls.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Instant};

use serde_json::json;
use tempfile::TempDir;
use wharf_names::ids::{ContainerId, IfName, NetworkName};

use super::*;
use crate::{
    error::SandboxError,
    manage::Progress,
    network::Plugins,
    record::{Attachment, Identity, Netns, Phase, Record, VERSION},
    store::{Lock, Store},
};

struct Scene {
    directory: TempDir,
    store: Store,
    lock: Lock,
    path: Vec<PathBuf>,
}

fn script(answer: &str) -> String {
    format!(
        "#!/bin/sh\ncd \"$(dirname \"$0\")\"\necho \"$CNI_COMMAND ${{0##*/}} $CNI_CONTAINERID $CNI_IFNAME [$CNI_NETNS] $CNI_ARGS $CNI_PATH\" \
         >> calls\ncat >> inputs; echo >> inputs\n{answer}\n"
    )
}

impl Scene {
    fn new(plugins: &[(&str, &str)]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::new(&directory.path().join("state"));
        store.ensure().unwrap();
        let lock = store.lock(&"web".parse().unwrap(), |_| ()).unwrap();
        let scene = Self { path: vec![directory.path().to_owned()], directory, store, lock };
        plugins.iter().for_each(|(name, answer)| scene.put(name, answer));
        scene
    }

    fn put(&self, name: &str, answer: &str) {
        let path = self.directory.path().join(name);
        fs::write(&path, script(answer)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn plugins(&self) -> Plugins<'_> {
        Plugins { store: &self.store, path: &self.path, lock: &self.lock, tell: &|_| (), no_wait: false }
    }

    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.directory.path().join("calls")).unwrap_or_default();
        fs::remove_file(self.directory.path().join("calls")).ok();
        text.lines().map(|line| line.split(' ').take(2).collect::<Vec<_>>().join(" ")).collect()
    }

    fn inputs(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.directory.path().join("inputs")).unwrap();
        fs::remove_file(self.directory.path().join("inputs")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn call(&self, plugin: &str, limit: Duration) -> Result<Option<Value>, Box<PluginError>> {
        let conf = json!({"cniVersion": "1.0.0", "name": "net", "type": plugin});
        Call {
            verb: Verb::Add,
            container_id: "web-1",
            netns: Path::new("/run/netns/web"),
            ifname: "eth0",
            cni_args: "IgnoreUnknown=1",
            path: &self.path,
            conf: &conf,
            lock: self.lock.file.as_fd(),
            limit,
        }
        .run(&|_| ())
    }
}

fn attachment(ifname: &str, version: &str, plugins: &[&str]) -> Attachment {
    let conf = |plugin: &&str| json!({"cniVersion": version, "name": "net", "type": plugin});
    Attachment {
        network: NetworkName::parse("net").unwrap(),
        ifname: IfName::parse(ifname).unwrap(),
        plugins: plugins.iter().map(conf).collect(),
        cni_args: "IgnoreUnknown=1".to_owned(),
        check: true,
        to_delete: 0,
        result: None,
    }
}

fn record(attachments: Vec<Attachment>) -> Record {
    Record {
        version: VERSION,
        name: "web".parse().unwrap(),
        container_id: ContainerId::parse("web-1").unwrap(),
        created_unix_ms: 1,
        boot_id: "boot".to_owned(),
        phase: Phase::Creating,
        problem: None,
        netns: Netns { path: "/run/netns/web".into(), identity: Identity { dev: 1, inode: 2, cookie: 3 } },
        labels: BTreeMap::new(),
        attachments,
        processes: Vec::new(),
    }
}

fn result(of: &str) -> String {
    format!("[ $CNI_COMMAND = ADD ] && echo '{{\"cniVersion\": \"1.0.0\", \"of\": \"{of}\"}}'; true")
}

#[test]
fn add_goes_forth_and_del_back_with_the_results() {
    let s = Scene::new(&[("one", &result("one")), ("two", &result("two"))]);
    let mut record = record(vec![attachment("eth0", "1.0.0", &["one", "two"]), attachment("eth1", "0.3.1", &["one"])]);
    s.plugins().add(&mut record).unwrap();
    assert_eq!(s.calls(), ["ADD one", "ADD two", "ADD one"]);
    let (one, two) = (json!({"cniVersion": "1.0.0", "of": "one"}), json!({"cniVersion": "1.0.0", "of": "two"}));
    let previous = |inputs: Vec<Value>| inputs.iter().map(|i| i.get("prevResult").cloned()).collect::<Vec<_>>();
    assert_eq!(previous(s.inputs()), [None, Some(one.clone()), None]);
    let results: Vec<_> = record.attachments.iter().map(|a| a.result.clone()).collect();
    assert_eq!(results, [Some(two.clone()), Some(one.clone())]);
    assert_eq!(s.store.load(&record.name).unwrap().unwrap().attachments[1].to_delete, 1);

    assert!(s.plugins().check(&record, 0).unwrap());
    assert_eq!(
        (s.calls(), previous(s.inputs())),
        (vec!["CHECK one".into(), "CHECK two".into()], vec![Some(two.clone()); 2])
    );

    s.plugins().del(&mut record, Path::new("/run/netns/web")).unwrap();
    assert_eq!(s.calls(), ["DEL one", "DEL two", "DEL one"]);
    // Version 0.3.1 has no `prevResult` at DEL.
    assert_eq!(previous(s.inputs()), [None, Some(two.clone()), Some(two)]);
    assert!(s.store.load(&record.name).unwrap().unwrap().attachments.iter().all(|a| a.to_delete == 0));
    s.plugins().del(&mut record, Path::new("")).unwrap();
    assert_eq!(s.calls(), Vec::<String>::new(), "a DEL that succeeded was repeated");
}

#[test]
fn an_add_that_fails_is_deleted_with_the_plugin_that_failed() {
    let refuses = "[ $CNI_COMMAND = ADD ] && { echo '{\"code\": 11, \"msg\": \"no address is free\", \"details\": \"wait\"}'; exit 1; }; true";
    let s = Scene::new(&[("one", &result("one")), ("two", refuses), ("three", &result("three"))]);
    let mut record = record(vec![attachment("eth0", "1.0.0", &["one", "two", "three"])]);
    let error = s.plugins().add(&mut record).unwrap_err();
    let told = "no address is free (ADD of plugin two, network net, interface eth0, code 11)";
    assert_eq!((error.to_string().as_str(), error.hint().as_deref()), (told, Some("wait")));
    assert_eq!(s.calls(), ["ADD one", "ADD two"]);
    s.plugins().del(&mut record, Path::new("/run/netns/web")).unwrap();
    assert_eq!(s.calls(), ["DEL two", "DEL one"]);
}

#[test]
fn a_del_that_fails_is_resumed_where_it_failed() {
    let s = Scene::new(&[("one", &result("one")), ("two", &result("two"))]);
    let mut record =
        record(vec![attachment("eth0", "1.0.0", &["one", "two"]), attachment("eth1", "1.0.0", &["two", "one"])]);
    s.plugins().add(&mut record).unwrap();
    s.calls();
    s.put("one", "echo '{\"code\": 11, \"msg\": \"busy\"}'; exit 1");
    let error = s.plugins().del(&mut record, Path::new("")).unwrap_err();
    assert_eq!(s.calls(), ["DEL one", "DEL two", "DEL one"]);
    assert!(matches!(&error, SandboxError::Several(all) if all.len() == 2), "{error}");
    assert!(error.to_string().contains("busy (DEL of plugin one, network net, interface eth1, code 11)"), "{error}");
    let mut kept = s.store.load(&record.name).unwrap().unwrap();
    s.put("one", "true");
    s.plugins().del(&mut kept, Path::new("")).unwrap();
    assert_eq!(s.calls(), ["DEL one", "DEL two", "DEL one"]);
}

#[test]
fn a_plugin_gets_the_specifications_environment_alone() {
    let s = Scene::new(&[("env", "env | grep '^CNI_' | sort > seen; echo '{}'")]);
    s.call("env", LIMIT).unwrap();
    let seen = fs::read_to_string(s.directory.path().join("seen")).unwrap();
    let path = s.directory.path().display();
    let wanted = format!(
        "CNI_ARGS=IgnoreUnknown=1\nCNI_COMMAND=ADD\nCNI_CONTAINERID=web-1\nCNI_IFNAME=eth0\nCNI_NETNS=/run/netns/web\nCNI_PATH={path}\n"
    );
    assert_eq!(seen, wanted);
}

#[test]
fn a_failure_says_what_the_plugin_said() {
    let s = Scene::new(&[
        ("dies", "echo first >&2; echo 'no such bridge' >&2; exit 3"),
        ("killed", "kill -9 $$"),
        ("babbles", "echo hello"),
        ("lists", "echo '[]'"),
        ("silent", "true"),
    ]);
    fs::write(s.directory.path().join("no-program"), "").unwrap();
    for (plugin, why) in [
        ("dies", "ended with exit status: 3: no such bridge"),
        ("killed", "signal: 9"),
        ("babbles", "its answer is no result"),
        ("lists", "it is no object"),
        ("silent", "its answer is no result"),
        ("missing", "no such program in"),
        ("no-program", "no such program in"),
    ] {
        let told = s.call(plugin, LIMIT).unwrap_err().to_string();
        assert!(told.contains(why) && told.contains(plugin), "{plugin}: {told}");
    }
}

#[test]
fn what_a_plugin_says_while_it_runs_is_told_before_it_ends() {
    let s = Scene::new(&[("waits", "echo \"$CNI_ARGS\" > args; echo 'no berth yet' >&2; read line < gate; echo '{}'")]);
    let gate = s.directory.path().join("gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let gate = fs::OpenOptions::new().read(true).write(true).open(gate).unwrap();
    let heard = std::sync::Mutex::new(Vec::new());
    let tell = |progress: Progress<'_>| {
        if let Progress::Said(line) = progress {
            heard.lock().unwrap().push(line.to_owned());
            (&gate).write_all(b"go\n").unwrap();
        }
    };
    let mut record = record(vec![attachment("eth0", "1.0.0", &["waits"])]);
    let plugins = Plugins { tell: &tell, no_wait: true, ..s.plugins() };
    plugins.add(&mut record).unwrap();
    assert_eq!(*heard.lock().unwrap(), ["plugin waits: no berth yet"]);
    let args = fs::read_to_string(s.directory.path().join("args")).unwrap();
    assert_eq!(args, "IgnoreUnknown=1;NoWait=1\n");
}

#[test]
fn a_plugin_that_hangs_is_killed_with_what_it_started() {
    let s = Scene::new(&[("hangs", "sleep 600 & echo $! > child; wait")]);
    let begun = Instant::now();
    let error = s.call("hangs", Duration::from_millis(500)).unwrap_err();
    assert!(matches!(error.cause, Failure::Late { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60));
    let child = fs::read_to_string(s.directory.path().join("child")).unwrap();
    let pid: i32 = child.trim().parse().unwrap();
    // SIGKILL takes effect when the process is next scheduled.
    let end = Instant::now() + Duration::from_secs(10);
    while crate::process::started(pid).unwrap().is_some() {
        assert!(Instant::now() < end, "process {pid} of the plugin lives on");
        std::thread::yield_now();
    }
}

#[test]
fn a_plugin_that_outlives_its_caller_keeps_the_lock() {
    let s = Scene::new(&[("leaves", "read line < gate & echo $! > child; echo '{}'")]);
    // The gate has a writer, so a reader waits.
    nix::unistd::mkfifo(&s.directory.path().join("gate"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    let gate = fs::OpenOptions::new().read(true).write(true).open(s.directory.path().join("gate")).unwrap();
    s.call("leaves", LIMIT).unwrap();
    let name = "web".parse().unwrap();
    let Scene { store, lock, directory, .. } = s;
    drop(lock);
    assert!(store.is_locked(&name), "a process of the plugin lives, and the lock is free");
    (&gate).write_all(b"go\n").unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while store.is_locked(&name) {
        assert!(Instant::now() < end, "the lock is still held");
        std::thread::yield_now();
    }
    drop(directory);
}
