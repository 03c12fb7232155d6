use wharf_api::{AgentStatus, CommandStatus, Health};

use super::*;

fn empty() -> AgentStatus {
    AgentStatus {
        overall: Health::Ok,
        serving: true,
        version: String::new(),
        abi_version: 1,
        node_name: String::new(),
        pid: 1,
        uptime_ms: 0,
        router: Vec::new(),
        kernel: KernelStatus::default(),
        network: NetworkStatus::default(),
        components: Vec::new(),
        controllers: Vec::new(),
        controllers_total: 0,
        controllers_unwell: 0,
        ipam: Vec::new(),
        endpoints: BTreeMap::new(),
        stuck: Vec::new(),
        quarantined: Vec::new(),
        deletion_queue: DeletionQueueStatus::default(),
        commands: CommandStatus::default(),
        admission: AdmissionStatus::default(),
        audit_findings: None,
        refused_transitions: 0,
        bpf_maps: Vec::new(),
        prepared: PreparedStatus::default(),
        proxy: ProxyStatus::default(),
        delegate: None,
        resident_bytes: 0,
        from_admin: false,
    }
}

fn said() -> Fill {
    Arc::new(|status| {
        status.resident_bytes = 7;
        status.components.push(ComponentStatus::new("store", Health::Ok, "5 commits"));
    })
}

const AGE: Duration = Duration::from_secs(12);
const WAITING: Duration = Duration::from_millis(1_500);

fn silent(health: Health) -> impl Fn() -> (Health, String) {
    move || (health, "waits for the disk".to_owned())
}

#[test]
fn what_is_fresh_is_taken_as_it_is() {
    let mut status = empty();
    put(&mut status, "store", Reading::Fresh(said()), || unreachable!("it answers"));
    assert_eq!(status.components, [ComponentStatus::new("store", Health::Ok, "5 commits")]);
}

#[test]
fn what_is_stale_is_kept_and_marked_with_its_age_and_what_it_waits_for() {
    let mut status = empty();
    let reading = Reading::Stale { value: said(), age: AGE, waiting: WAITING };
    put(&mut status, "store", reading, silent(Health::Pending));
    let component = ComponentStatus {
        stale_ms: Some(12_000),
        ..ComponentStatus::new("store", Health::Degraded, "5 commits; no answer for 1500 ms: waits for the disk")
    };
    assert_eq!(status.components, [component]);
    assert_eq!(status.resident_bytes, 7, "the last value is shown");
}

#[test]
fn what_is_stale_is_as_bad_as_what_it_waits_for() {
    let mut status = empty();
    let reading = Reading::Stale { value: said(), age: AGE, waiting: WAITING };
    put(&mut status, "store", reading, silent(Health::Failing));
    assert_eq!(status.components.first().map(|c| c.health), Some(Health::Failing));
}

#[test]
fn what_never_answered_is_named() {
    let mut status = empty();
    put(&mut status, "store", Reading::Unknown { waiting: AGE }, silent(Health::Ok));
    let component = ComponentStatus {
        stale_ms: Some(12_000),
        ..ComponentStatus::new("store", Health::Degraded, "not known: no answer for 12 s: waits for the disk")
    };
    assert_eq!(status.components, [component]);
}

#[test]
fn a_part_without_a_component_gets_one_while_it_is_stale() {
    let fill: Fill = Arc::new(|status| status.resident_bytes = 7);
    let mut status = empty();
    put(&mut status, "process", Reading::Stale { value: fill, age: AGE, waiting: WAITING }, silent(Health::Ok));
    assert_eq!(status.resident_bytes, 7);
    assert_eq!(status.components.first().map(|c| (c.name.as_str(), c.stale_ms)), Some(("process", Some(12_000))));
}
