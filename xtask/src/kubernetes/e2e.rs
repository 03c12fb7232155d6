//! Kubernetes' own network tests.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use serde_json::Value;

use super::{
    api::{elements, text},
    cluster::Cluster,
    network,
    table::{Row, Verdict},
};

const AREA: &str = "[sig-network]";

/// Name in the table, and a part of test names.
type Group = (&'static str, &'static str);

const GROUPS: [Group; 3] = [
    ("e2e: Conformance", "[Conformance]"),
    ("e2e: Netpol", "Netpol NetworkPolicy"),
    ("e2e: IPv6DualStack", "[Feature:IPv6DualStack]"),
];

/// A part of the names of excluded tests, and the reason.
const LEFT_OUT: [(&str, &str); 3] = [
    ("[Feature:SCTPConnectivity]", "needs the kernel's sctp module"),
    ("LoadBalancer", "the cluster has no load balancers"),
    ("[Disruptive]", "restarts programs of the nodes in ways of its own"),
];

#[derive(Debug, PartialEq, Eq)]
struct Test {
    name: String,
    state: String,
}

/// Runs the groups that match one of `filters`, or all.
pub(crate) fn run(cluster: &Cluster<'_>, program: &Path, filters: &[String]) -> Result<Vec<Row>> {
    let chosen: Vec<Group> = GROUPS
        .into_iter()
        .filter(|(name, _)| filters.is_empty() || filters.iter().any(|filter| name.contains(filter.as_str())))
        .collect();
    let groups = if chosen.is_empty() { GROUPS.to_vec() } else { chosen };
    let started = Instant::now();
    routes(cluster)?;
    let directory = cluster.run.join("e2e");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let report = cluster.logs.join("e2e.json");
    let log = cluster.logs.join("e2e.log");
    let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
    let second = output.try_clone().context("open a log twice")?;
    let mut command = cluster.api.place.command("env");
    command.arg(format!("HOME={}", directory.display())).arg(program);
    command.arg(format!("--kubeconfig={}", cluster.pki.file("admin.conf")));
    command.arg(format!("--kubectl-path={}", cluster.parts.programs.path("kubectl").display()));
    command.args(["--provider=skeleton", "--allowed-not-ready-nodes=0", "--disable-log-dump=true"]);
    command.arg(format!("--num-nodes={}", cluster.nodes.len()));
    command.args(["--dump-logs-on-failure=false", "--ginkgo.no-color", "--ginkgo.timeout=6h"]);
    command.arg(format!(
        "--ginkgo.focus={}.*({})",
        escaped(AREA),
        groups.iter().map(|(_, part)| escaped(part)).collect::<Vec<_>>().join("|")
    ));
    command.arg(format!("--ginkgo.skip={}", LEFT_OUT.map(|(part, _)| escaped(part)).join("|")));
    command.arg(format!("--ginkgo.json-report={}", report.display()));
    command.stdout(output).stderr(second).status().context("start e2e.test")?;
    let text = fs::read(&report).with_context(|| format!("no report of e2e.test; see {}", log.display()))?;
    let report = serde_json::from_slice(&text).with_context(|| format!("read {}", report.display()))?;
    Ok(rows(&groups, &tests(&groups, &report), started.elapsed()))
}

/// Routes from the control plane to the pod CIDRs: the API server's proxy connects to pods.
fn routes(cluster: &Cluster<'_>) -> Result<()> {
    for node in &cluster.nodes {
        for cidr in cluster.pod_cidrs(node.name())? {
            let v6 = cidr.contains(':');
            let (to_node, to_router) =
                if v6 { (node.host.ipv6(), "fd30::1") } else { (node.host.ipv4(), "172.30.0.1") };
            let root = cluster.space.root();
            root.output("ip", &["-n", "router", "route", "replace", &cidr, "via", &to_node])?;
            root.output("ip", &["-n", network::CONTROL_NAME, "route", "replace", &cidr, "via", to_router])?;
        }
    }
    Ok(())
}

fn escaped(part: &str) -> String {
    part.replace('[', r"\[").replace(']', r"\]")
}

fn tests(groups: &[Group], report: &Value) -> Vec<Test> {
    let suites = report.as_array().map(Vec::as_slice).unwrap_or_default();
    let specs = suites.iter().flat_map(|suite| elements(suite, "/SpecReports"));
    let all = specs.map(|spec| {
        let mut name: Vec<_> = elements(spec, "/ContainerHierarchyTexts").iter().filter_map(Value::as_str).collect();
        name.push(text(spec, "/LeafNodeText"));
        Test { name: name.join(" "), state: text(spec, "/State").to_owned() }
    });
    let is_ours = |test: &Test| test.name.contains(AREA) && groups.iter().any(|(_, part)| test.name.contains(part));
    all.filter(is_ours).collect()
}

fn rows(groups: &[Group], tests: &[Test], took: Duration) -> Vec<Row> {
    let mut rows = Vec::new();
    for (check, part) in groups {
        let of_group = || tests.iter().filter(|test| test.name.contains(part));
        let count = |state: &str| of_group().filter(|test| test.state == state).count();
        let failed: Vec<_> =
            of_group().filter(|test| !["passed", "skipped", "pending"].contains(&&*test.state)).collect();
        let (passed, skipped) = (count("passed"), count("skipped") + count("pending"));
        let mut note = format!("{passed} passed, {} failed, {skipped} not run", failed.len());
        for test in &failed {
            note.push_str("\n  ");
            note.push_str(&test.name);
        }
        let verdict = if failed.is_empty() && passed > 0 { Verdict::Passed(note) } else { Verdict::Failed(note) };
        rows.push(Row { check: (*check).to_owned(), verdict, took });
    }
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for test in tests.iter().filter(|test| ["skipped", "pending"].contains(&&*test.state)) {
        let why = LEFT_OUT.iter().find(|(part, _)| test.name.contains(part)).map(|(_, why)| *why);
        *reasons.entry(why.unwrap_or("the test does not apply to this cluster")).or_default() += 1;
    }
    rows.extend(reasons.into_iter().map(|(why, count)| {
        let verdict = Verdict::NotRun(format!("{count} tests: {why}"));
        Row { check: "e2e".to_owned(), verdict, took: Duration::ZERO }
    }));
    rows
}

#[cfg(test)]
mod tests_of_reports {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_report_has_a_row_for_each_group_and_reason() {
        let area = ["[sig-network] A"];
        let spec =
            |name: &str, state: &str| json!({"ContainerHierarchyTexts": area, "LeafNodeText": name, "State": state});
        let report = json!([{"SpecReports": [
            spec("one [Conformance]", "passed"),
            spec("two [Feature:SCTPConnectivity] [Conformance]", "skipped"),
            spec("three Netpol NetworkPolicy", "failed"),
            spec("four", "skipped"),
            {"ContainerHierarchyTexts": ["[sig-node] B"], "LeafNodeText": "five [Conformance]", "State": "passed"},
        ]}]);
        let rows = rows(&GROUPS, &tests(&GROUPS, &report), Duration::ZERO);
        let notes: Vec<_> = rows.iter().map(|row| row.cells().join("|")).collect();
        assert_eq!(
            notes,
            [
                "e2e: Conformance|passed|0.0 s|1 passed, 0 failed, 1 not run",
                "e2e: Netpol|FAILED|0.0 s|0 passed, 1 failed, 0 not run",
                "e2e: IPv6DualStack|FAILED|0.0 s|0 passed, 0 failed, 0 not run",
                "e2e|not run|0.0 s|1 tests: needs the kernel's sctp module",
            ]
        );
    }
}
