use std::fs;

use clap::Parser as _;

use super::*;
use crate::config::Flags;

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().expect("network")).collect()
}

fn config(directory: &Path, flags: &[&str]) -> AgentConfig {
    let state = format!("--state-dir={}", directory.display());
    let all = ["wharf-agent", "--node-name=a", "--pools-from-cluster", &state].into_iter().chain(flags.iter().copied());
    AgentConfig::load(Flags::try_parse_from(all).expect("flags parse")).expect("loads")
}

fn resolved(directory: &Path, flags: &[&str]) -> (Vec<IpNet>, FromCluster) {
    let mut config = config(directory, flags);
    resolve(&mut config);
    (in_use(&config), config.pools_from_cluster.expect("the setting"))
}

const FEED: &[&str] = &["--cluster-feed=/run/x/feed"];

fn keep(directory: &Path, cidrs: &[&str], previous: &[&str]) {
    let kept = Kept::new("a".to_owned(), nets(cidrs), nets(previous), "boot".to_owned());
    write(&directory.join(FILE), &kept).expect("written");
}

#[test]
fn a_start_has_the_pools_of_the_cluster_file_else_those_of_the_last_start() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    assert_eq!(resolved(path, FEED), (Vec::new(), FromCluster::default()));
    keep(path, &["10.1.0.0/24"], &[]);
    let (cidrs, from) = resolved(path, FEED);
    assert_eq!((cidrs, from.source.as_str(), from.problem), (nets(&["10.1.0.0/24"]), "this node's last row", None));

    let file = path.join("nodes.toml");
    let flag = format!("--cluster-file={}", file.display());
    assert_eq!(resolved(path, &[&flag]).0, nets(&["10.1.0.0/24"]), "without the file");
    let entry = |cidr: &str| format!("[[node]]\nname = 'a'\naddresses = ['192.0.2.1']\npod-cidrs = ['{cidr}']\n");
    fs::write(&file, entry("10.2.0.0/24")).expect("written");
    let (cidrs, from) = resolved(path, &[&flag]);
    assert_eq!((cidrs, from.problem), (nets(&["10.2.0.0/24"]), None));
    assert_eq!(from.source, "this node's entry in the cluster file");

    fs::write(&file, entry("10.2.0.1/32")).expect("written");
    let (cidrs, from) = resolved(path, &[&flag]);
    assert_eq!(cidrs, nets(&["10.1.0.0/24"]), "the entry cannot be a pool");
    assert!(from.problem.is_some_and(|why| why.contains("10.2.0.1/32") && why.contains("too small")));
}

#[test]
fn a_start_replaces_refused_pools_by_those_that_were_last_in_use() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    let file = path.join("nodes.toml");
    let flag = format!("--cluster-file={}", file.display());
    let entry = "[[node]]\nname = 'a'\naddresses = ['192.0.2.1']\npod-cidrs = ['10.3.0.0/24']\n";
    fs::write(&file, entry).expect("written");
    for (kept, previous, flags, first, then) in [
        (&["10.1.0.0/24"] as &[&str], &[] as &[&str], FEED, "10.1.0.0/24", None),
        (&["10.2.0.0/24"], &["10.1.0.0/24"], FEED, "10.2.0.0/24", Some("10.1.0.0/24")),
        (&["10.2.0.0/32"], &["10.1.0.0/24"], FEED, "10.1.0.0/24", None),
        (&["10.2.0.0/24"], &["10.1.0.0/32"], FEED, "10.2.0.0/24", None),
        (&["10.1.0.0/24"], &[], &[&*flag], "10.3.0.0/24", Some("10.1.0.0/24")),
        (&["10.2.0.0/24"], &["10.1.0.0/24"], &[&*flag], "10.3.0.0/24", Some("10.1.0.0/24")),
        (&["10.3.0.0/24"], &[], &[&*flag], "10.3.0.0/24", None),
    ] {
        keep(path, kept, previous);
        let mut config = config(path, flags);
        resolve(&mut config);
        assert_eq!(in_use(&config), nets(&[first]), "{kept:?}, {previous:?}");
        let falls = fall_back(&mut config, "because");
        assert_eq!(falls, then.is_some(), "{kept:?}, {previous:?}");
        assert_eq!(in_use(&config), nets(&[then.unwrap_or(first)]), "{kept:?}, {previous:?}");
        if falls {
            let from = config.pools_from_cluster.clone().expect("the setting");
            let why = from.problem.expect("a problem");
            assert!(why.contains(first) && why.contains("because") && why.ends_with("last in use stay"), "{why}");
            assert_eq!((from.source.as_str(), from.earlier), (EARLIER, Vec::new()));
            assert!(!fall_back(&mut config, "again"), "once");
        }
        refuse(&mut config, "an overlap");
        assert!(in_use(&config).is_empty(), "without other pools");
    }
}

#[test]
fn the_pools_before_are_kept_until_a_start_has_succeeded() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    let kept = || read_kept(&path.join(FILE), "a").expect("read").expect("a file");
    keep(path, &["10.2.0.0/24"], &["10.1.0.0/24"]);
    let written = kept();
    let mut new = config(path, FEED);
    resolve(&mut new);
    assert_eq!(kept().previous, nets(&["10.1.0.0/24"]), "the start may still refuse the new pools");
    keep_at_start(&new, "boot");
    assert_eq!((kept().cidrs, kept().previous), (nets(&["10.2.0.0/24"]), Vec::new()));
    assert_eq!(kept().changed_ms, written.changed_ms, "no other change");
    keep(path, &["10.2.0.0/24"], &["10.1.0.0/24"]);
    let mut before = config(path, FEED);
    resolve(&mut before);
    refuse(&mut before, "an overlap");
    keep_at_start(&before, "boot");
    assert_eq!((kept().cidrs, kept().previous), (nets(&["10.1.0.0/24"]), Vec::new()));
}

#[test]
fn a_start_after_one_that_failed_with_new_pools_has_the_pools_before() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    let (file, new, before) = (path.join("nodes.toml"), nets(&["10.2.0.0/24"]), nets(&["10.1.0.0/24"]));
    let entry = "[[node]]\nname = 'a'\naddresses = ['192.0.2.1']\npod-cidrs = ['10.2.0.0/24']\n";
    fs::write(&file, entry).expect("written");
    let flag = format!("--cluster-file={}", file.display());
    for (kept, previous, flags) in [
        (&["10.2.0.0/24"] as &[&str], &["10.1.0.0/24"] as &[&str], FEED),
        // The row changed while the agent was stopped.
        (&["10.1.0.0/24"], &[], &[&*flag]),
    ] {
        keep(path, kept, previous);
        let start = || {
            let mut config = config(path, flags);
            resolve(&mut config);
            note_attempt(&config, "boot");
            config
        };
        assert_eq!(in_use(&start()), new, "{kept:?}");
        let second = start();
        assert_eq!(in_use(&second), before, "{kept:?}");
        let problem = second.pools_from_cluster.clone().and_then(|from| from.problem).expect("a problem");
        assert!(problem.contains("10.2.0.0/24") && problem.contains("has failed"), "{problem}");
        assert_eq!(in_use(&start()), before, "until a start has succeeded");
        keep_at_start(&second, "boot");
        keep(path, &["10.2.0.0/24"], &["10.1.0.0/24"]);
        keep_at_start(&start(), "boot");
        let kept = read_kept(&path.join(FILE), "a").expect("read").expect("a file");
        assert_eq!((kept.cidrs, kept.previous, kept.tried), (new.clone(), Vec::new(), false));
        assert_eq!(in_use(&start()), new);
    }
}

#[test]
fn the_pools_of_a_start_are_kept_and_a_damaged_file_is_set_aside() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join(FILE);
    fs::write(&file, "{").expect("written");
    let (cidrs, from) = resolved(directory.path(), FEED);
    assert!(cidrs.is_empty() && from.problem.is_some_and(|why| why.contains("pools.json")));
    let mut config = config(directory.path(), FEED);
    keep_at_start(&config, "boot");
    assert!(!file.exists() && directory.path().join("pools.json.damaged").exists());
    config.set_pools(nets(&["10.1.0.0/24", "10.2.0.0/24"]));
    keep_at_start(&config, "boot");
    let kept = read_kept(&file, "a").expect("read").expect("a file");
    assert_eq!((kept.cidrs, kept.boot_id.as_str()), (nets(&["10.1.0.0/24", "10.2.0.0/24"]), "boot"));
    assert_eq!(config.masquerade.map(|masquerade| masquerade.pools), Some(nets(&["10.1.0.0/24", "10.2.0.0/24"])));
    for text in [
        "{\"version\":2,\"node\":\"a\",\"cidrs\":[],\"boot_id\":\"\",\"changed_ms\":0}",
        "{\"version\":1,\"node\":\"b\",\"cidrs\":[],\"boot_id\":\"\",\"changed_ms\":0}",
        "[]",
        "",
    ] {
        fs::write(&file, text).expect("written");
        assert!(read_kept(&file, "a").is_err(), "{text}");
    }
}

#[tokio::test]
async fn a_change_is_kept_before_the_restart_and_the_next_one_waits() {
    let directory = tempfile::tempdir().expect("directory");
    let own = || OwnPools::new(&config(directory.path(), FEED)).expect("the setting");
    let (none, one) = (own(), nets(&["10.1.0.0/24"]));
    assert_eq!(none.missing().as_deref(), Some("this node's row has no pod CIDRs yet"));
    assert_eq!((none.decide(&[]).await, none.decide(&one).await), (Decision::Keep, Decision::Restart));
    none.refuse(&one, "because");
    assert!(
        none.is_refused(&one) && !none.is_refused(&[]) && none.missing().is_some_and(|why| why.contains("because"))
    );
    let what = none.restart_with(&one).await.expect("written");
    assert!(what.starts_with("pools none -> 10.1.0.0/24"), "{what}");
    none.restarts().await;
    let kept = read_kept(&directory.path().join(FILE), "a").expect("read").expect("a file");
    assert_eq!((kept.cidrs, kept.previous), (one.clone(), Vec::new()), "there were no pools before");
    assert_eq!(none.decide(&one).await, Decision::Keep, "one restart at a time");

    // Two more pools within 30 s, and a file that cannot be written.
    let two = nets(&["10.2.0.0/24"]);
    let after = own();
    assert!(matches!(after.decide(&two).await, Decision::Wait(_)));
    assert!(after.outdated(&two).is_some_and(|why| why.contains("10.2.0.0/24")) && after.outdated(&[]).is_none());
    after.postpone(&two, 1_500);
    assert!(after.view().pending.is_some_and(|text| text.contains("10.2.0.0/24") && text.ends_with("in 2 s")));
    after.settle();
    assert_eq!((after.view().pending, after.view().refused), (None, None));
    after.refuse(&two, "because");
    assert_eq!(after.outdated(&two), None, "the pools in use stay");
    after.postpone(&two, 1_500);
    assert!(after.outdated(&two).is_some(), "the pod CIDRs are no longer refused");
    after.refuse(&two, "because");
    after.settle();
    assert!(after.outdated(&two).is_some(), "the pod CIDRs are no longer refused");
    after.refuse(&two, "because");
    fs::create_dir(directory.path().join("pools.json.new")).expect("made");
    assert!(after.restart_with(&two).await.is_err() && after.view().refused.is_some());
    assert!(after.outdated(&two).is_some(), "the restart is tried again");
}

#[test]
fn pod_cidrs_that_cannot_be_pools_are_refused_with_the_reason() {
    let directory = tempfile::tempdir().expect("directory");
    let config = config(directory.path(), &[FEED, &["--service-cidr=10.96.0.0/12"]].concat());
    for (cidrs, why) in [
        (&["10.1.0.0/32"] as &[&str], "too small"),
        (&["127.0.0.0/24"], "loopback"),
        (&["10.97.0.0/24"], "services 10.96.0.0/12"),
        (&["10.1.0.0/24", "10.1.0.0/25"], "overlap"),
    ] {
        let refused = usable(&config, &nets(cidrs)).expect_err(why);
        assert!(refused.contains(why), "{refused}");
    }
    assert_eq!(
        usable(&config, &nets(&["10.1.0.0/24"])).expect("pools").routers(),
        [std::net::IpAddr::from([10, 1, 0, 1])]
    );
}
