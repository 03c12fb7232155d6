use std::ffi::OsString;

use clap::Parser as _;

use super::{
    merge::{DEFAULT_V4, merge},
    *,
};

fn flags(args: &[&str]) -> Flags {
    Flags::try_parse_from(std::iter::once(&"wharf-agent").chain(args)).expect("flags parse")
}

#[test]
fn a_flag_wins_over_the_file() {
    let file: File = toml::from_str("mtu = 1400\nnode-name = 'from-file'").expect("file parses");
    let config = merge(flags(&["--mtu", "9000"]), file, None).expect("merges");
    assert_eq!((config.mtu, config.node_name.as_str()), (Some(9000), "from-file"));
}

#[test]
fn an_unknown_key_is_an_error_that_names_it() {
    let error = toml::from_str::<File>("ipv4-pol = ['10.0.0.0/8']").expect_err("refused");
    assert!(error.to_string().contains("ipv4-pol"), "{error}");
}

#[test]
fn pools_of_the_file_follow_the_default_pool() {
    let file: File = toml::from_str("[[pool]]\nname = 'blue'\ncidrs = ['10.9.0.7/24']").expect("file parses");
    let config = merge(flags(&[]), file, None).expect("merges");
    assert_eq!(config.pools.len(), 2);
    assert_eq!(config.pools[1].cidrs[0].to_string(), "10.9.0.0/24");
}

#[test]
fn a_family_mixed_up_is_refused() {
    let error = merge(flags(&["--ipv4-pool", "fd00::/64"]), File::default(), None).expect_err("refused");
    assert_eq!(error.to_string(), "setting ipv4-pool: fd00::/64 is not an IPv4 CIDR");
}

#[test]
fn a_family_is_off_where_its_pool_is_empty() {
    let cidrs = |args: &[&str]| -> Vec<String> {
        let config = merge(flags(args), File::default(), None).expect("merges");
        config.pools.iter().flat_map(|p| &p.cidrs).map(ToString::to_string).collect()
    };
    assert_eq!(cidrs(&["--ipv6-pool="]), ["10.87.0.0/16"]);
    assert_eq!(cidrs(&["--ipv4-pool=", "--ipv6-pool", "fd01::/64,fd02::/64"]), ["fd01::/64", "fd02::/64"]);
    assert_eq!(cidrs(&["--ipv6-pool=fd01::/64", "--ipv6-pool=fd02::/64"]), ["10.87.0.0/16", "fd01::/64", "fd02::/64"]);
    assert!(Flags::try_parse_from(["wharf-agent", "--ipv4-pool", "10.0.0.0/8,"]).is_err(), "a CIDR is missing");
}

#[test]
fn where_ipv6_is_off_the_default_is_ipv4_alone_and_an_explicit_pool_is_refused() {
    let off = Some("because");
    let config = merge(flags(&[]), File::default(), off).expect("merges");
    assert_eq!(config.pools[0].cidrs, [DEFAULT_V4]);
    assert_eq!(config.ipv6_off, off, "told, as nobody asked for it");
    let asked = merge(flags(&["--ipv6-pool="]), File::default(), off).expect("merges");
    assert_eq!((asked.pools[0].cidrs.len(), asked.ipv6_off), (1, None));
    let by_flag = merge(flags(&["--ipv6-pool", "fd01::/64"]), File::default(), off).expect_err("refused");
    let words = "setting ipv6-pool: fd01::/64 cannot be used: IPv6 is off on this node (because); turn it on, or start \
                 without IPv6 pools (--ipv6-pool=)";
    assert_eq!(by_flag.to_string(), words);
    let file: File = toml::from_str("[[pool]]\nname = 'blue'\ncidrs = ['fd02::/64']").expect("file parses");
    assert!(merge(flags(&[]), file, off).is_err(), "of another pool too");
}

#[test]
fn pools_come_from_the_cluster_or_from_settings() {
    const FEED: &str = "--cluster-feed=/run/x/feed";
    let config = merge(flags(&["--pools-from-cluster", FEED]), File::default(), Some("because")).expect("merges");
    assert!(config.pools.is_empty() && config.pools_from_cluster == Some(FromCluster::default()));
    assert_eq!(config.masquerade.map(|masquerade| masquerade.pools), Some(Vec::new()));
    let file: File = toml::from_str("pools-from-cluster = 'on'\ncluster-file = '/nodes.toml'").expect("file parses");
    assert!(merge(flags(&[]), file, None).expect("merges").pools_from_cluster.is_some());
    let off = merge(flags(&["--pools-from-cluster=off"]), File::default(), None).expect("merges");
    assert_eq!((off.pools.len(), off.pools_from_cluster), (1, None));
    let of_file = |text: &str| toml::from_str::<File>(text).expect("file parses");
    for (arguments, file, why) in [
        (&["--pools-from-cluster"] as &[&str], "", "needs a list of nodes"),
        (&["--pools-from-cluster", FEED, "--ipv4-pool=10.1.0.0/24"], "", "on beside ipv4-pool"),
        (&["--pools-from-cluster", FEED], "ipv6-pool = []", "on beside ipv6-pool"),
        (&["--pools-from-cluster", FEED], "[[pool]]\nname = 'b'\ncidrs = ['10.9.0.0/24']", "on beside pool:"),
    ] {
        let refused = merge(flags(arguments), of_file(file), None).expect_err(why).to_string();
        assert!(refused.starts_with("setting pools-from-cluster: ") && refused.contains(why), "{refused}");
    }
}

#[test]
fn each_setting_knows_where_it_comes_from() {
    let dir = tempfile::tempdir().expect("make directory");
    let path = dir.path().join("agent.toml");
    std::fs::write(&path, "mtu = 1400\nnode-name = 'x'\n[[pool]]\nname = 'blue'\ncidrs = []").expect("write");
    let arguments = ["wharf-agent", "--config", &path.display().to_string(), "--mtu", "9000"].map(str::to_owned);
    let matches = Flags::command().try_get_matches_from(&arguments).expect("flags parse");
    let mut config = AgentConfig::load(Flags::from_arg_matches(&matches).expect("flags")).expect("loads");
    config.origins.extend(given(&matches));
    let of = |name: &str| config.origins.get(name).copied();
    assert_eq!((of("mtu"), of("node-name")), (Some(SettingOrigin::Flag), Some(SettingOrigin::File)));
    assert_eq!((of("pool.blue"), of("run-dir")), (Some(SettingOrigin::File), None));
}

#[test]
fn a_cause_is_told_once() {
    let error = AgentConfig::load(flags(&["--config", "/nonexistent/agent.toml"])).expect_err("no such file");
    let told = format!("{:#}", anyhow::Error::from(error));
    assert_eq!(told, "read configuration /nonexistent/agent.toml: No such file or directory (os error 2)");
}

#[test]
fn a_refused_setting_names_where_it_comes_from() {
    let dir = tempfile::tempdir().expect("make directory");
    let path = dir.path().join("agent.toml");
    std::fs::write(&path, "mtu = 99").expect("write");
    let refused = |arguments: &[&str]| {
        let arguments: Vec<OsString> =
            std::iter::once("wharf-agent").chain(arguments.iter().copied()).map(OsString::from).collect();
        AgentConfig::of(&parse(&arguments).expect("parses")).expect_err("refused").to_string()
    };
    let file = path.display().to_string();
    assert!(refused(&["--mtu", "98"]).starts_with("setting mtu (--mtu): 98 is not within"));
    assert!(refused(&["--config", &file]).starts_with(&format!("setting mtu ({file}): 99 is not within")));
    assert!(refused(&["--config", &file, "--mtu", "98"]).starts_with("setting mtu (--mtu): 98 is not within"));
}

#[test]
fn an_mtu_too_small_for_ipv6_is_refused() {
    assert!(merge(flags(&["--mtu", "1279"]), File::default(), None).is_err());
}

#[test]
fn the_overlay_has_defaults_and_bounds() {
    let config = merge(flags(&[]), File::default(), None).expect("merges");
    assert_eq!((config.routing, config.overlay_port, config.overlay_vni), (Routing::Auto, 4789, 88));
    let text = "routing = 'overlay'\noverlay-port = 8472\noverlay-vni = 16777215";
    let file: File = toml::from_str(text).expect("file parses");
    let config = merge(flags(&["--routing", "native"]), file, None).expect("merges");
    assert_eq!((config.routing, config.overlay_port, config.overlay_vni), (Routing::Native, 8472, 16_777_215));
    for (flag, message) in [
        ("--overlay-port=0", "setting overlay-port: 0 is not within 1 to 65535"),
        ("--overlay-vni=0", "setting overlay-vni: 0 is not within 1 to 16777215"),
        ("--overlay-vni=16777216", "setting overlay-vni: 16777216 is not within 1 to 16777215"),
    ] {
        assert_eq!(merge(flags(&[flag]), File::default(), None).expect_err("refused").to_string(), message);
    }
}

#[test]
fn the_root_is_no_directory_of_an_agents_own() {
    let nameless: File = toml::from_str("run-dir = ''").expect("file parses");
    let of_flags = ["--run-dir=/", "--state-dir=/..", "--bpffs=."].map(|flag| (flags(&[flag]), File::default()));
    for (flags, file) in of_flags.into_iter().chain([(flags(&[]), nameless)]) {
        let error = merge(flags, file, None).expect_err("refused").to_string();
        assert!(error.contains("is not a directory of the agent's own"), "{error}");
    }
}

#[test]
fn a_wait_for_the_proxy_that_outlasts_the_shim_is_refused() {
    let error = merge(flags(&["--proxy-timeout-ms", "3001"]), File::default(), None).expect_err("refused");
    assert!(error.to_string().starts_with("setting proxy-timeout-ms: 3001 is above 3000"), "{error}");
    assert!(merge(flags(&["--proxy-timeout-ms", "3000"]), File::default(), None).is_ok());
}
