//! The tests of a guest, each in its own process.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    progress::{Step, describe},
    workspace::Workspace,
};

/// Ends of manifest paths.
const PACKAGES: &[&str] = &["/tests/Cargo.toml", "/crates/datapath/Cargo.toml"];

/// Prefixes of `FILE::NAME` for each kernel: hooks, verifier, rows, nftables with packets, and an agent's main path.
const EVERYWHERE: &[&str] = &[
    "abi_versions::endpoints_are_carried_over_without_loss_with_tcx",
    "attach::",
    "cluster::containers_of_two_nodes",
    "nft_packets::",
    "packets::live::",
    "packets::size::",
    "policy_rows::linux::",
    "life::containers_reach_each_other",
    "masquerade::a_container_reaches_the_world",
    "overlay::containers_of_different_subnets",
    "redirect::egress_rules_redirect",
    "restart::traffic_never_stops_when_the_agent_is_killed",
    "unit::the_units_capabilities_are_enough_for_a_life",
];

/// Prefixes of `FILE::NAME` for the oldest kernel and for netkit only: decisions by the same instructions on each kernel,
/// and a life cycle of each kind.
const WHOLE: &[&str] = &[
    "abi_versions::a_load_that_fails",
    "abi_versions::endpoints_are_carried_over_without_loss",
    "linux::",
    "nft::",
    "nft_foreign::",
    // Other tests of `packets` are independent of the kernel.
    "packets::clients::",
    "packets::established::",
    "packets::events::",
    "packets::limits::",
    "packets::policy::",
    "packets::recent::",
    "announce::neighbours_find_containers",
    "cleanup::cleanup_takes_every_trace",
    "cluster::routes_follow_the_file",
    "cluster::what_is_not_wharfs",
    "delete::a_del_is_answered_before",
    "delete::many_deletes_at_once",
    "faults::kernel::",
    "flows::flows_have_the_right_ends",
    "health::it_is_an_endpoint_like_any_other",
    "life::two_interfaces_of_one_container",
    "masquerade::off_touches_neither",
    "mtu::",
    "overlay::frames_that_no_known_node",
    "policing::every_false_frame",
    "policy::gaps::an_endpoint_is_policed_from_its_first_packet",
    "policy::change::a_tightened_policy_cuts_flows_at_once",
    "policy::packets::errors_about_an_allowed_flow_pass",
    "policy::packets::fragments_share",
    "policy::truth::network_policy::peers_of_network_policies",
    "ports::a_published_port_is_reached_from_everywhere",
    "ports::sctp_passes",
    "redirect::connections_to_the_world",
    "redirect::ingress_rules_redirect",
    "redirect::udp::rules_of_either_end",
    "redirects::",
    "regenerate::counters_live_on",
    "selfcheck::a_healthy_endpoint",
    "services::a_container_reaches_its_neighbour",
    "unlist::",
    "world::a_smaller_mtu",
];

/// With the reason.
pub(crate) const LEFT_OUT: &[(&str, &str)] = &[
    ("podman", "needs podman and its image store"),
    ("plugins", "needs Debian's plugins and iptables"),
    ("bench", "measures, which an emulated processor cannot"),
    ("fake", "touches no kernel"),
    ("corpus", "touches no kernel, and reads the checkout"),
    ("l7", "needs Envoy, which no guest has; `redirect` has the kernel's part"),
    ("lint", "needs promtool and mandoc"),
];

/// Prefixes of `FILE::NAME`, with the reason: time limits are too short for an emulated processor.
pub(crate) const TOO_FAST: &[(&str, &str)] = &[
    (
        "regenerate::no_packet_is_lost_while_programs_are_replaced",
        "sends 10,000 packets a second beside a TCP stream; attach::replacements_lose_nothing_* asks the same of fewer",
    ),
    ("crash_matrix::", "starts the agent a thousand times"),
    ("unit::the_unit_is_enough_for_envoy", "needs Envoy, which no guest has"),
    ("upgrade::an_upgrade_killed", "starts the agent a hundred times, under traffic"),
    ("upgrade::an_upgrade_with_tcx_killed", "starts the agent a hundred times, under traffic"),
    ("upgrade::a_downgrade_killed", "starts the agent a hundred times, under traffic"),
    ("packets::flows::rows_say_what_a_model_says", "a million packets; the others of that file have each rule once"),
    ("packets::flows::a_flood_evicts", "a million packets, faster than a processor of that kind makes them"),
    ("bandwidth::a_limit_holds", "measures rates, and sends packets faster than an emulated processor"),
    ("churn::", "two thousand operations against an agent that is killed again and again"),
    ("nft::two_mappings_cost", "measures, which an emulated processor cannot"),
    ("nft_packets::flows_from_two_containers", "sends from two processors at once and counts what a race loses"),
    ("concurrency::sixteen_at_once", "makes 16 endpoints at once, each step within the agent's own deadline"),
];

/// Files whose tests run alone at the end: packets and the restarting agent need both of a guest's processors.
const ALONE: &[&str] = &["restart"];

pub(crate) fn is_alone(line: &str) -> bool {
    line.split_once(' ').is_some_and(|(file, _)| ALONE.contains(&file))
}

#[derive(Debug)]
pub(crate) struct TestFile {
    /// Stem of the file in `tests/`, or library name.
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    tests: Vec<Test>,
}

#[derive(Debug)]
struct Test {
    name: String,
    /// Otherwise only in whole runs.
    everywhere: bool,
}

/// `FILE NAME` of each test.
pub(crate) fn lines(files: &[TestFile], whole: bool) -> Vec<String> {
    let of_file = |file: &TestFile| -> Vec<String> {
        let tests = file.tests.iter().filter(|test| whole || test.everywhere);
        tests.map(|test| format!("{} {}", file.name, test.name)).collect()
    };
    files.iter().flat_map(of_file).collect()
}

/// Tests whose `FILE::NAME` contains a filter, or [`EVERYWHERE`] and [`WHOLE`]. Fails if a list names a missing test.
pub(crate) fn make(step: &Step, workspace: &Workspace, filters: &[String]) -> Result<Vec<TestFile>> {
    let build = || {
        let mut command = workspace.cargo();
        // As `cargo xtask test`: other features would cause a rebuild.
        command.args(["test", "--no-run", "--locked", "--workspace"]);
        command
    };
    step.run(&mut build())?;
    let mut command = build();
    command.args(["--quiet", "--message-format", "json"]);
    let messages = output_of(&mut command)?;
    let mut files = Vec::new();
    for (name, path) in messages.lines().filter_map(parse_artifact) {
        if LEFT_OUT.iter().any(|(left_out, _)| *left_out == name) {
            continue;
        }
        let list = |which: &[&str]| {
            let mut command = Command::new(&path);
            command.current_dir(workspace.root()).args(["--list", "--format", "terse"]).args(which);
            anyhow::Ok(parse_list(&output_of(&mut command)?))
        };
        let ignored: BTreeSet<String> = list(&["--ignored"])?.into_iter().collect();
        let wanted =
            |test: &String| !ignored.contains(test) && !is_too_fast(&name, test) && is_wanted(filters, &name, test);
        let everywhere = |test: &str| !filters.is_empty() || begins(EVERYWHERE, &name, test);
        let tests = list(&[])?.into_iter().filter(wanted);
        let tests: Vec<_> = tests.map(|test| Test { everywhere: everywhere(&test), name: test }).collect();
        if !tests.is_empty() {
            files.push(TestFile { name, path, tests });
        }
    }
    if files.is_empty() {
        bail!("choose tests: none contains {}; see `cargo nextest list`", filters.join(" or "));
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some([one, other]) = files.array_windows().find(|[one, other]| one.name == other.name) {
        bail!(
            "plan the guests' tests: {} and {} have one name there; rename one",
            one.path.display(),
            other.path.display()
        );
    }
    if filters.is_empty() {
        let names =
            |file: &TestFile| file.tests.iter().map(|test| format!("{}::{}", file.name, test.name)).collect::<Vec<_>>();
        let names: Vec<String> = files.iter().flat_map(names).collect();
        let mut chosen = EVERYWHERE.iter().chain(WHOLE);
        if let Some(lost) = chosen.find(|beginning| !names.iter().any(|name| name.starts_with(**beginning))) {
            bail!("plan the guests' tests: none begins with {lost}; mend the list in xtask/src/vm/plan.rs");
        }
    }
    let [all, everywhere] = [true, false].map(|whole| lines(&files, whole).len());
    step.note(format!("{all} tests in {} files, {everywhere} of them on each kernel", files.len()));
    Ok(files)
}

pub(crate) fn output_of(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("start `{}`", describe(command)))?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}): {}", describe(command), output.status, told.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn parse_artifact(line: &str) -> Option<(String, PathBuf)> {
    let message: Value = serde_json::from_str(line).ok()?;
    let manifest = message.get("manifest_path")?.as_str()?;
    let is_test = message.pointer("/profile/test")?.as_bool()? && PACKAGES.iter().any(|end| manifest.ends_with(end));
    let kind = message.pointer("/target/kind/0")?.as_str()?;
    let name = message.pointer("/target/name")?.as_str()?;
    let path = message.get("executable")?.as_str()?;
    (is_test && matches!(kind, "test" | "lib")).then(|| (name.to_owned(), PathBuf::from(path)))
}

/// `live::a_closed_gate_lets_nothing_through: test`.
pub(crate) fn parse_list(output: &str) -> Vec<String> {
    output.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

fn begins(list: &[&str], file: &str, test: &str) -> bool {
    let name = format!("{file}::{test}");
    list.iter().any(|beginning| name.starts_with(beginning))
}

fn is_too_fast(file: &str, test: &str) -> bool {
    let name = format!("{file}::{test}");
    TOO_FAST.iter().any(|(beginning, _)| name.starts_with(beginning))
}

fn is_wanted(filters: &[String], file: &str, test: &str) -> bool {
    if filters.is_empty() {
        return begins(EVERYWHERE, file, test) || begins(WHOLE, file, test);
    }
    let name = format!("{file}::{test}");
    filters.iter().any(|filter| name.contains(filter.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_binaries_are_told_from_other_artifacts() {
        let artifact = |kind: &str, test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/datapath/Cargo.toml","target":{{"kind":["{kind}"],"name":"life"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = Some(("life".to_owned(), PathBuf::from("/t/life-1")));
        assert_eq!(parse_artifact(&artifact("test", true, "\"/t/life-1\"")), found);
        assert_eq!(parse_artifact(&artifact("lib", true, "\"/t/life-1\"")), found);
        assert_eq!(parse_artifact(&artifact("bin", true, "\"/t/life-1\"")), None);
        assert_eq!(parse_artifact(&artifact("lib", false, "null")), None);
        let elsewhere = artifact("test", true, "\"/t/life-1\"").replace("datapath", "core");
        assert_eq!(parse_artifact(&elsewhere), None);
        assert_eq!(parse_artifact("not json"), None);
    }

    #[test]
    fn test_files_of_the_guests_have_names_of_their_own() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let mut names = BTreeSet::new();
        for package in ["tests", "crates/datapath"] {
            for entry in std::fs::read_dir(format!("{root}/{package}/tests")).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").is_file() {
                    assert!(names.insert(path.file_stem().unwrap().to_owned()), "{} has a second", path.display());
                }
            }
        }
        assert!(names.len() > 30, "{names:?}");
    }

    #[test]
    fn tests_are_listed_and_chosen_by_file_and_name() {
        assert_eq!(parse_list("a::b: test\nc: test\nbench_x: benchmark\n\n2 tests\n"), ["a::b", "c"]);
        let filters = ["restart::".to_owned(), "life::ten".to_owned()];
        assert!(is_wanted(&filters, "restart", "anything"));
        assert!(is_wanted(&filters, "life", "tenants"));
        assert!(!is_wanted(&filters, "life", "nine"));
        assert!(is_wanted(&[], "attach", "nine") && !is_wanted(&[], "life", "nine"));
        assert!(is_wanted(&[], "mtu", "nine") && !begins(EVERYWHERE, "mtu", "nine"));
        assert!(is_wanted(&["::".to_owned()], "life", "nine"), "all");
        assert!(is_too_fast("concurrency", "sixteen_at_once_get_addresses"));
        assert!(!is_too_fast("concurrency", "adds_racing_their_own_dels_leave_nothing"));
    }
}
