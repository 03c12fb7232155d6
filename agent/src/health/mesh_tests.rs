use std::{
    collections::BTreeSet,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::time::sleep;
use wharf_cluster::{
    nodes::{NodeRow, Nodes},
    routes::{Destination, Unrouted},
};
use wharf_kit::sync::lock;

use super::*;

const INTERVAL: Duration = Duration::from_secs(10);

struct Fake {
    outcomes: Mutex<BTreeMap<String, (Outcome, Outcome)>>,
    starts: Mutex<Vec<(Instant, String)>>,
    takes: Duration,
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Prober for Fake {
    async fn probe(&self, peer: &Peer) -> Vec<Probed> {
        lock(&self.starts).push((Instant::now(), peer.name.clone()));
        let running = self.running.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(running, Ordering::Relaxed);
        sleep(self.takes).await;
        self.running.fetch_sub(1, Ordering::Relaxed);
        let said = lock(&self.outcomes).get(&peer.name).cloned();
        let (icmp, http) = said.unwrap_or((answered(), answered()));
        let of_node =
            peer.addresses.iter().map(|a| Probed { address: *a, kind: ProbeKind::Icmp, outcome: icmp.clone() });
        let of_health =
            peer.health.iter().map(|a| Probed { address: *a, kind: ProbeKind::Http, outcome: http.clone() });
        of_node.chain(of_health).collect()
    }
}

#[derive(Default)]
struct Told {
    news: Mutex<Vec<(Instant, bool, String)>>,
    swept: AtomicUsize,
}

impl Sink for Told {
    fn states(&self, _: &BTreeMap<HealthState, u64>) {}

    fn news(&self, is_well: bool, text: String) {
        lock(&self.news).push((Instant::now(), is_well, text));
    }

    fn swept(&self, _: Duration, _: Duration) {
        self.swept.fetch_add(1, Ordering::Relaxed);
    }
}

fn answered() -> Outcome {
    Outcome::Answered(Duration::from_millis(1))
}

fn no_answer() -> Outcome {
    Outcome::NoAnswer("no answer within 1s".into())
}

fn name(n: usize) -> String {
    format!("n{n:04}")
}

fn row(name: &str, n: usize) -> NodeRow {
    let [high, low] = [n / 250, n % 250].map(|n| u8::try_from(n).expect("a byte"));
    NodeRow {
        name: name.to_owned(),
        addresses: vec![[172, 16, high, low].into()],
        pod_cidrs: vec![format!("10.{high}.{low}.0/24").parse().expect("CIDR")],
        health_addresses: vec![[10, high, low, 2].into()],
        router_addresses: Vec::new(),
    }
}

fn cluster(others: impl IntoIterator<Item = usize>) -> Arc<InForce> {
    let own = row("a", 5_000);
    let rows = std::iter::once(own).chain(others.into_iter().map(|n| row(&name(n), n))).collect();
    Arc::new(InForce { nodes: Nodes::new(rows).expect("nodes"), ..InForce::default() })
}

struct World {
    fake: Fake,
    told: Arc<Told>,
    health: Arc<Health>,
    nodes: watch::Sender<Arc<InForce>>,
}

impl World {
    /// With the nodes 0 to `others`, whose probes take this time.
    fn new(others: usize, takes: Duration) -> Self {
        let fake = Fake {
            outcomes: Mutex::default(),
            starts: Mutex::default(),
            takes,
            running: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        };
        let health = Arc::new(Health::of("a", INTERVAL));
        Self { fake, told: Arc::default(), health, nodes: watch::Sender::new(cluster(0..others)) }
    }

    async fn play(&self, interval: Duration, driver: impl Future<Output = ()>) {
        let stop = CancellationToken::new();
        let mut mesh = Mesh::new("a".to_owned(), interval, Arc::clone(&self.health), Arc::clone(&self.told));
        let driven = async {
            driver.await;
            stop.cancel();
        };
        tokio::join!(mesh.serve(&self.fake, self.nodes.subscribe(), &stop), driven);
    }

    fn answer(&self, n: usize, of_node: Outcome, of_health: Outcome) {
        lock(&self.fake.outcomes).insert(name(n), (of_node, of_health));
    }

    fn names(&self) -> Vec<String> {
        self.health.report().nodes.into_iter().map(|node| node.node).collect()
    }

    fn view(&self, n: usize) -> NodeHealth {
        let name = name(n);
        self.health.report().nodes.into_iter().find(|node| node.node == name).expect("the node is shown")
    }

    fn starts(&self) -> usize {
        lock(&self.fake.starts).len()
    }
}

#[tokio::test(start_paused = true)]
async fn each_node_is_probed_once_in_an_interval_and_the_starts_are_spread() {
    let world = World::new(10, Duration::from_millis(1));
    let began = Instant::now();
    world.play(INTERVAL, sleep(Duration::from_millis(19_500))).await;
    let starts = lock(&world.fake.starts).clone();
    let names: Vec<String> = starts.iter().map(|(_, name)| name.clone()).collect();
    let once: Vec<String> = (0..10).map(name).collect();
    assert_eq!(names, [once.clone(), once].concat());
    for (second, (at, name)) in (0_u64..).zip(&starts) {
        let late = at.duration_since(began).abs_diff(Duration::from_secs(second));
        assert!(late < Duration::from_millis(10), "{name} at {:?}", at.duration_since(began));
    }
    assert_eq!(world.told.swept.load(Ordering::Relaxed), 2);
    assert_eq!(world.names(), ["a"], "after the stop");
}

#[tokio::test(start_paused = true)]
async fn more_nodes_than_fit_take_turns_and_the_others_say_so() {
    let world = World::new(1_200, Duration::from_millis(1));
    let driver = async {
        sleep(Duration::from_millis(9_995)).await;
        assert_eq!(world.starts(), 500);
        let states = world.health.peer_states();
        assert_eq!(states, BTreeMap::from([(HealthState::Ok, 500), (HealthState::Starting, 700)]));
        assert_eq!(world.view(1_199).message, "not probed yet: a sweep probes 500 of 1200 other nodes");
        sleep(2 * INTERVAL).await;
        let starts = lock(&world.fake.starts).clone();
        let different: BTreeSet<&String> = starts.iter().map(|(_, name)| name).collect();
        assert_eq!((starts.len(), different.len()), (1_500, 1_200));
        assert_eq!(world.health.peer_states(), BTreeMap::from([(HealthState::Ok, 1_200)]));
    };
    world.play(INTERVAL, driver).await;
}

#[tokio::test(start_paused = true)]
async fn few_nodes_are_probed_at_once_and_a_short_interval_has_few_starts() {
    let slow = World::new(100, Duration::from_secs(2));
    slow.play(Duration::from_secs(1), sleep(Duration::from_secs(16))).await;
    assert_eq!(slow.fake.most.load(Ordering::Relaxed), AT_ONCE);
    for pair in lock(&slow.fake.starts).windows(2) {
        assert!(pair[1].0 - pair[0].0 >= PACE, "{pair:?}");
    }
    let fast = World::new(100, Duration::from_millis(1));
    fast.play(Duration::from_millis(100), sleep(Duration::from_secs(1))).await;
    let starts = fast.starts();
    assert!((90..=110).contains(&starts), "{starts} starts in a second");
}

#[tokio::test(start_paused = true)]
async fn a_state_follows_from_the_last_rounds() {
    let world = World::new(1, Duration::from_millis(1));
    let driver = async {
        sleep(Duration::from_secs(5)).await;
        let check = |state: HealthState, failed: u64, message: &str| {
            let view = world.view(0);
            assert_eq!((view.state, view.failed_rounds), (state, failed), "{view:?}");
            assert!(view.message.contains(message), "{view:?}");
            view
        };
        let first = check(HealthState::Ok, 0, "2 of 2 probes answered");
        assert!(!first.local && first.rounds == 1 && first.last_round_unix_ms.is_some(), "{first:?}");
        assert_eq!((first.ipv4, first.ipv6), (Some(Ipv4Addr::new(10, 0, 0, 2)), None));
        assert_eq!(first.probes.iter().map(|p| p.last_us).collect::<Vec<_>>(), [Some(1_000), Some(1_000)]);
        world.answer(0, no_answer(), no_answer());
        for failed in 1..=2 {
            sleep(INTERVAL).await;
            check(HealthState::Degraded, failed, "2 of 2 probes failed: ICMP to 172.16.0.0: no answer within 1s; HTTP");
        }
        for failed in 3..=4 {
            sleep(INTERVAL).await;
            check(HealthState::Down, failed, &format!("no answer in {failed} rounds in a row: ICMP to 172.16.0.0"));
        }
        world.answer(0, answered(), no_answer());
        for failed in 5..=9 {
            sleep(INTERVAL).await;
            check(HealthState::Degraded, failed, "1 of 2 probes failed: HTTP to 10.0.0.2");
        }
        world.answer(0, answered(), Outcome::WrongAnswer("something else answers".into()));
        sleep(INTERVAL).await;
        check(HealthState::WrongAnswer, 10, "HTTP to 10.0.0.2: something else answers; find out who");
        world.answer(0, answered(), answered());
        sleep(INTERVAL).await;
        let last = check(HealthState::Ok, 0, "2 of 2 probes answered");
        assert_eq!((last.rounds, last.probes[0].sent, last.probes[0].lost), (12, 12, 4));
        world.answer(0, Outcome::NotTried("no CAP_NET_RAW".into()), Outcome::NotTried("no".into()));
        sleep(INTERVAL).await;
        check(HealthState::Degraded, 0, "no probe is sent: ICMP to 172.16.0.0: no CAP_NET_RAW");
    };
    world.play(INTERVAL, driver).await;
    let news = lock(&world.told.news).clone();
    let changes: Vec<&str> = news.iter().filter_map(|(_, _, text)| text.split(": ").nth(1)).collect();
    assert_eq!(changes, ["degraded -> down", "wrong-answer -> ok"]);
    assert_eq!(news.iter().map(|(_, is_well, _)| *is_well).collect::<Vec<_>>(), [false, true]);
}

#[tokio::test(start_paused = true)]
async fn many_changes_share_a_line_each_second() {
    let world = World::new(200, Duration::from_millis(1));
    (0..200).for_each(|n| world.answer(n, no_answer(), no_answer()));
    world.play(INTERVAL, sleep(Duration::from_secs(9) + 3 * INTERVAL)).await;
    let news = lock(&world.told.news).clone();
    let number = |text: &str| text.split(' ').next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(1);
    assert_eq!(news.iter().map(|(_, _, text)| number(text)).sum::<u64>(), 200, "{news:?}");
    for pair in news.windows(2) {
        assert!(pair[1].0 - pair[0].0 >= NEWS_PACE, "{pair:?}");
    }
    assert!(news[1].2.contains("to down); the last one: node n0") && !news[1].1, "{news:?}");
}

#[tokio::test(start_paused = true)]
async fn a_node_that_leaves_is_dropped_at_once_and_a_late_answer_does_not_bring_it_back() {
    let world = World::new(3, Duration::from_secs(5));
    let driver = async {
        sleep(Duration::from_secs(1)).await;
        assert_eq!(world.names(), ["a", "n0000", "n0001", "n0002"]);
        world.nodes.send_replace(cluster([1, 2]));
        sleep(Duration::from_millis(2)).await;
        assert_eq!(world.names(), ["a", "n0001", "n0002"]);
        sleep(Duration::from_secs(7)).await;
        assert_eq!(world.names(), ["a", "n0001", "n0002"], "its probes have ended");
        world.nodes.send_replace(cluster([]));
        sleep(Duration::from_millis(2)).await;
        assert_eq!(world.names(), ["a"]);
        let before = world.starts();
        sleep(5 * INTERVAL).await;
        assert_eq!(world.starts(), before);
        world.nodes.send_replace(cluster([7]));
        sleep(SETTLE / 2).await;
        assert_eq!(world.starts(), before);
        sleep(Duration::from_secs(6)).await;
        assert_eq!(world.view(7).state, HealthState::Ok);
    };
    world.play(INTERVAL, driver).await;
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_a_former_address_does_not_count() {
    let world = World::new(1, Duration::from_secs(5));
    let driver = async {
        sleep(Duration::from_secs(1)).await;
        let moved = NodeRow { health_addresses: Vec::new(), ..row(&name(0), 0) };
        let nodes = Nodes::new(vec![row("a", 5_000), moved]).expect("nodes");
        world.nodes.send_replace(Arc::new(InForce { nodes, ..InForce::default() }));
        sleep(Duration::from_secs(6)).await;
        let view = world.view(0);
        assert_eq!((view.state, view.rounds, view.ipv4), (HealthState::Starting, 0, None));
        sleep(INTERVAL).await;
        let view = world.view(0);
        assert_eq!((view.state, view.rounds, view.probes.len()), (HealthState::Ok, 1, 1));
    };
    world.play(INTERVAL, driver).await;
}

#[test]
fn a_family_that_this_nodes_row_lacks_is_not_probed() {
    let ips = |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().expect("address")).collect() };
    let both = NodeRow {
        name: "b".to_owned(),
        addresses: ips(&["192.0.2.2", "2001:db8::2"]),
        pod_cidrs: ["10.2.0.0/16", "fd00:2::/64"].map(|cidr| cidr.parse().expect("CIDR")).to_vec(),
        health_addresses: ips(&["10.2.0.2", "fd00:2::2"]),
        router_addresses: ips(&["10.2.0.1"]),
    };
    let peer_of = |own: NodeRow| {
        let nodes = Nodes::new(vec![own, both.clone()]).expect("nodes");
        peers(&InForce { nodes, ..InForce::default() }, "a").remove("b").expect("a peer")
    };
    let peer = peer_of(row("a", 5_000));
    assert_eq!((peer.addresses.clone(), peer.health.clone()), (ips(&["192.0.2.2"]), ips(&["10.2.0.2"])));
    let skipped: Vec<IpAddr> = peer.skipped.iter().map(|(address, _)| *address).collect();
    assert_eq!(skipped, ips(&["2001:db8::2", "fd00:2::2"]));
    assert_eq!(peer.targets().len(), 2);
    // IPv6 for the pods over IPv4 between the nodes.
    let pod_cidrs = vec!["fd00:9::/64".parse().expect("CIDR")];
    let peer = peer_of(NodeRow { pod_cidrs, health_addresses: Vec::new(), ..row("a", 5_000) });
    assert_eq!((peer.addresses, peer.health), (ips(&["192.0.2.2"]), ips(&["fd00:2::2"])));
    let nodes = Nodes::new(vec![both.clone()]).expect("nodes");
    let mut alone = InForce { nodes, ..InForce::default() };
    assert!(peers(&alone, "a")["b"].skipped.is_empty());
    let to = |cidr: &str, why| Destination { node: "b".into(), cidr: cidr.parse().expect("CIDR"), via: Err(why) };
    let pool = Unrouted::Pool("10.2.0.0/16".parse().expect("CIDR"));
    alone.destinations = vec![to("10.2.0.0/16", pool), to("fd00:2::/64", Unrouted::NotNear)];
    let peer = peers(&alone, "a").remove("b").expect("a peer");
    assert_eq!((peer.health, peer.skipped), (ips(&["fd00:2::2"]), vec![(ips(&["10.2.0.2"])[0], REFUSED)]));
}

#[test]
fn a_message_names_a_few_failures() {
    let failures: Vec<String> = (0..6).map(|n| n.to_string()).collect();
    assert_eq!(named(&failures), "0; 1; 2; 3; and 2 more");
    assert_eq!(named(&failures[..2]), "0; 1");
}
