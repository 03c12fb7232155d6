//! Network policy during the life of endpoints. The rows exist before an endpoint is attached, and are removed with it.
//! The wanted state survives a restart. Changes that the kernel refused are retried.

use std::{collections::BTreeMap, net::IpAddr};

use ipnet::IpNet;
use wharf_agent::{endpoint::create::CreateSpec, node::network::ClusterFailure, policy::error::PolicyError};
use wharf_core::{kernel::KernelErrorKind as Kind, policy::PolicyRows};
use wharf_datapath::fake::Operation as Op;

use crate::support::*;

/// Pods with this label get packets from nobody.
pub(crate) fn isolates(app: &str) -> String {
    format!(
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {{name: {app}}}\nspec:\n  podSelector: \
         {{matchLabels: {{app: {app}}}}}\n  policyTypes: [Ingress]\n"
    )
}

/// As [`isolates`], for pods of namespaces with a label.
pub(crate) const OF_NAMESPACES: &str = "
apiVersion: cilium.io/v2
kind: CiliumClusterwideNetworkPolicy
metadata: {name: dark}
spec:
  endpointSelector:
    matchLabels: {'k8s:io.cilium.k8s.namespace.labels.light': 'off'}
  ingress: [{}]
";

pub(crate) fn rows(machine: &Machine) -> PolicyRows {
    machine.kernel.policy().0
}

/// Rule set of what an endpoint gets.
pub(crate) fn ingress(machine: &Machine, endpoint: u16) -> u32 {
    rows(machine).sets.get(&id(endpoint)).map_or(0, |sets| sets.ingress)
}

#[test]
fn rows_are_there_before_an_endpoint_is_attached_and_go_with_it() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        let handle = agent.create("c1").await;
        assert_ne!(ingress(&machine, handle.id.get()), 0);
        let operations = agent.operations();
        let of = |operation| operations.iter().enumerate().filter(move |(_, o)| **o == operation).map(|(at, _)| at);
        let (puts, attached) = (of(Op::ChangePolicy).collect::<Vec<_>>(), of(Op::EnsureAttached).collect::<Vec<_>>());
        assert!(
            puts.len() == 2 && attached.len() == 1 && puts[1] < attached[0],
            "the import's, then its own: {operations:?}"
        );
        assert!(agent.delete(&handle).await.errors.is_empty());
        let left = rows(&machine);
        assert!(left.sets.values().all(|sets| sets.ingress == 0 && sets.egress == 0), "{left:?}");
        assert!(left.peers.keys().all(|net| net.prefix_len() == 0 || net.addr().to_string().ends_with(['1', ':'])));
    });
}

#[test]
fn without_a_policy_no_row_is_written() {
    Machine::new().life(async |agent| {
        let handle = agent.create("c1").await;
        agent.life.policy.ensure().await.expect("nothing to do");
        assert!(agent.delete(&handle).await.errors.is_empty());
        assert!(!agent.operations().contains(&Op::ChangePolicy));
    });
}

#[test]
fn what_is_wanted_outlives_the_agent() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        agent.life.policy.import("b.yaml", &isolates("db")).await.expect("imported");
    });
    let before = rows(&machine);
    machine.life(async |agent| {
        let list = agent.life.policy.list().await;
        assert_eq!((list.revision, list.realized, list.policies.len()), (2, 2, 2));
        assert_ne!(ingress(&machine, 1), 0);
        assert_eq!(rows(&machine), before, "no row is written, and no flow is judged again");
        agent.life.policy.delete_all().await.expect("deleted");
        assert_eq!(ingress(&machine, 1), 0);
    });
    machine.life(async |agent| assert_eq!(agent.life.policy.list().await.policies, []));
}

#[test]
fn a_text_that_is_refused_changes_nothing() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        let before = (rows(&machine), agent.life.policy.list().await);
        let bad = format!("{}---\n{}", isolates("db"), isolates("x").replace("podSelector", "podselector"));
        let refused = agent.life.policy.import("bad.yaml", &bad).await.expect_err("refused");
        assert!(matches!(refused, PolicyError::Refused(_)), "{refused}");
        assert!(refused.to_string().starts_with("bad.yaml:"), "{refused}");
        assert_eq!((rows(&machine), agent.life.policy.list().await), before);
    });
}

#[test]
fn a_kernel_that_refuses_half_way_is_led_to_what_is_wanted() {
    for index in 0..6 {
        let machine = Machine::new();
        machine.life(async |agent| {
            agent.create("c1").await;
            agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
            agent.kernel.fail_policy_at(index, Kind::Exhausted);
            let both = isolates("web").replace("[Ingress]", "[Ingress, Egress]");
            let Err(failed) = agent.life.policy.import("a.yaml", &both).await else { return };
            assert!(matches!(failed, PolicyError::Kernel(_)), "{failed}");
            let list = agent.life.policy.list().await;
            assert_eq!((list.revision, list.realized), (2, 1));
            assert!(list.problem.is_some_and(|why| why.contains("put policy into the kernel")));
            agent.life.policy.ensure().await.expect("the kernel takes them now");
            let list = agent.life.policy.list().await;
            assert_eq!((list.realized, list.problem), (2, None));
            let rows = rows(&machine);
            assert!(rows.sets[&id(1)].ingress != 0 && rows.sets[&id(1)].egress != 0);
            assert_eq!(rows.cells.len() as u64, list.rows.cells, "nothing of the change before is left");
            assert_eq!(rows.peers.len() as u64, list.rows.peers);
        });
    }
}

#[test]
fn an_endpoint_whose_rows_the_kernel_refuses_is_refused_and_leaves_nothing() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        agent.kernel.fail_next(Op::ChangePolicy, Kind::Exhausted);
        let refused = agent.try_create(agent.container("c1")).await.expect_err("refused");
        assert!(refused.message.contains("put policy into the kernel"), "{}", refused.message);
        assert!(agent.life.endpoints.registry.is_empty());
        agent.create("c2").await;
        assert_eq!(rows(&machine).sets.values().filter(|sets| sets.ingress != 0).count(), 1);
    });
}

#[test]
fn a_start_that_cannot_read_the_rows_is_put_right_later() {
    let machine = Machine::new();
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
    });
    machine.kernel.fail_next(Op::ObservePolicy, Kind::Other);
    machine.life(async |agent| {
        assert_ne!(ingress(&machine, 1), 0, "the rows of before are in force");
        assert!(agent.life.policy.list().await.realized < 1);
        agent.life.policy.ensure().await.expect("read now");
        assert_eq!(agent.life.policy.list().await.realized, 1);
    });
}

#[test]
fn labels_of_a_namespace_move_its_endpoints() {
    let machine = Machine::new();
    machine.life(async |agent| {
        let spec = CreateSpec { pod_namespace: Some("shop".into()), ..agent.container("c1") };
        agent.try_create(spec).await.expect("created");
        agent.create("c2").await;
        agent.life.policy.import("a.yaml", OF_NAMESPACES).await.expect("imported");
        assert_eq!((ingress(&machine, 1), ingress(&machine, 2)), (0, 0));
        let dark = BTreeMap::from([("light".to_owned(), "off".to_owned())]);
        agent.life.policy.set_namespace("shop", Some(dark)).await.expect("set");
        assert!(ingress(&machine, 1) != 0 && ingress(&machine, 2) == 0);
        agent.life.policy.set_namespace("shop", None).await.expect("forgotten");
        assert_eq!(ingress(&machine, 1), 0);
        agent.life.policy.set_namespace("Shop!", Some(BTreeMap::new())).await.expect_err("no name");
    });
}

#[test]
fn a_directory_that_does_not_fit_is_told_and_taken_when_it_fits() {
    let mut machine = Machine::new();
    let directory = machine.config.state_dir.join("policies");
    std::fs::create_dir(&directory).expect("made");
    machine.config.policy_dir = Some(directory.clone());
    machine.life(async |agent| {
        agent.life.policy.import("a.yaml", &isolates("db")).await.expect("imported");
        let handle = agent.create("c1").await;
        // Each of the networks has a row for each of the ports: more than fit.
        let networks: Vec<String> =
            (0..600).map(|n| format!("{{ipBlock: {{cidr: 172.16.{}.{}/32}}}}", n / 256, n % 256)).collect();
        let ports: Vec<String> =
            (1..=600).map(|n| format!("{{from: [{}], ports: [{{port: {}}}]}}", networks[0], 2 * n)).collect();
        let (networks, ports) = (networks.join(", "), ports.join(", "));
        let all = format!("{{from: [{networks}], ports: [{{port: 1, endPort: 65535}}]}}");
        let wide = format!("{}  ingress: [{all}, {ports}]\n", isolates("web"));
        let file = std::fs::File::create(directory.join("wide.yaml")).expect("made");
        std::io::Write::write_all(&mut &file, wide.as_bytes()).expect("written");
        file.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(10)).expect("settled");
        let before = rows(&machine);
        for _ in 0..3 {
            let refused = agent.life.policy.ensure().await.expect_err("too large");
            assert!(matches!(refused, PolicyError::Rows(_)), "{refused}");
            assert_eq!(agent.life.policy.list().await.problem, Some(refused.to_string()));
            assert_eq!((rows(&machine), agent.life.policy.list().await.policies.len()), (before.clone(), 1));
        }
        // Without the container nothing has the rules.
        assert!(agent.delete(&handle).await.errors.is_empty());
        agent.life.policy.ensure().await.expect("it fits");
        let list = agent.life.policy.list().await;
        assert_eq!((list.policies.len(), list.problem), (2, None));
    });
}

#[test]
fn a_table_of_an_earlier_version_has_its_own_limit_and_a_remedy() {
    let machine = Machine::new();
    machine.kernel.set_peers_max(32);
    machine.life(async |agent| {
        agent.create("c1").await;
        assert_eq!(agent.life.policy.list().await.rows.peers_limit, 31, "one row stays free");
        let networks: Vec<String> = (0..40).map(|n| format!("{{ipBlock: {{cidr: 172.16.0.{n}/32}}}}")).collect();
        let wide = format!("{}  ingress: [{{from: [{}]}}]\n", isolates("web"), networks.join(", "));
        let refused = agent.life.policy.import("a.yaml", &wide).await.expect_err("too large").to_string();
        let names = ["than the 31 that fit", "until the node boots", "after that, 524287 fit"];
        assert!(names.iter().all(|name| refused.contains(name)), "{refused}");
    });
}

#[test]
fn routes_to_other_nodes_do_not_wait_for_policy() {
    let mut machine = Machine::new();
    let file = machine.config.state_dir.join("nodes.toml");
    let own = "[[node]]\nname = \"test\"\naddresses = [\"192.0.2.1\"]\n\n";
    let other = "[[node]]\nname = \"b\"\naddresses = [\"192.0.2.2\"]\npod-cidrs = [\"10.99.0.0/24\"]\n";
    std::fs::write(&file, own).expect("written");
    machine.config.cluster_file = Some(file.clone());
    machine.life(async |agent| {
        agent.create("c1").await;
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("imported");
        std::fs::write(&file, format!("{own}{other}")).expect("written");
        agent.life.network.load_cluster("boot").await.expect("nodes");
        let before = machine.kernel.calls(Op::EnsureNode);
        machine.kernel.fail_next(Op::ChangePolicy, Kind::Exhausted);
        machine.kernel.fail_next(Op::EnsureNode, Kind::Permission);
        let why = agent.life.network.put_cluster().await.expect_err("both fail");
        assert!(matches!(why, ClusterFailure::Both { .. }), "{why}");
        assert_eq!(machine.kernel.calls(Op::EnsureNode), before + 1);
        // Policy retries by itself.
        agent.life.network.put_cluster().await.expect("the routes");
        agent.life.policy.ensure().await.expect("the rows");
        assert!(rows(&machine).peers.contains_key(&"10.99.0.0/24".parse().expect("a network")));
    });
}

#[test]
fn a_revision_in_force_covers_the_addresses_that_the_node_has() {
    let machine = Machine::new();
    let has_row = |address: IpAddr| rows(&machine).peers.contains_key(&IpNet::from(address));
    let [first, second, third] = ["192.0.2.1", "192.0.2.2", "2001:db8::3"].map(|a| a.parse().expect("an address"));
    machine.life(async |agent| {
        agent.create("c1").await;
        machine.kernel.add_node_address(first);
        agent.life.policy.import("a.yaml", &isolates("web")).await.expect("the first policy");
        assert!(has_row(first));
        machine.kernel.add_node_address(second);
        agent.life.policy.import("b.yaml", &isolates("db")).await.expect("another policy");
        assert!(has_row(second));
        machine.kernel.add_node_address(third);
        agent.life.policy.follow_addresses().await.expect("followed");
        assert!(has_row(third));
    });
}
