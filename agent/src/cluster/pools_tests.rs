use clap::Parser as _;

use super::*;
use crate::config::Flags;

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().expect("network")).collect()
}

/// Of node `a`, with these flags and directories in `directory`.
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

#[test]
fn a_start_has_the_pools_of_the_cluster_file_else_those_of_the_last_start() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path();
    assert_eq!(resolved(path, FEED), (Vec::new(), FromCluster::default()));
    write(&path.join(FILE), "a".to_owned(), nets(&["10.1.0.0/24"]), "boot".to_owned()).expect("written");
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
    assert_eq!(none.decide(&one).await, Decision::Keep, "one restart at a time");

    // Two more pools within 30 s, and a file that cannot be written.
    let two = nets(&["10.2.0.0/24"]);
    let after = own();
    assert!(matches!(after.decide(&two).await, Decision::Wait(_)));
    after.postpone(&two, 1_500);
    assert!(after.view().pending.is_some_and(|text| text.contains("10.2.0.0/24") && text.ends_with("in 2 s")));
    after.settle();
    assert_eq!((after.view().pending, after.view().refused), (None, None));
    fs::create_dir(directory.path().join("pools.json.new")).expect("made");
    assert!(after.restart_with(&two).await.is_err() && after.view().refused.is_some());
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
