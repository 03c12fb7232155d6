use std::os::unix::fs::MetadataExt as _;

use futures::FutureExt as _;
use tempfile::TempDir;
use wharf_cluster::feed::{FeedNamespace, FeedNode, FeedPolicy, Key, Row};

use super::*;

#[derive(Default)]
struct Taker {
    taken: Mutex<Vec<(Effects, Complete)>>,
    fails: Mutex<bool>,
}

impl Taker {
    fn last(&self) -> (Effects, Complete) {
        lock(&self.taken).pop().unwrap_or_default()
    }

    fn fail(&self, fails: bool) {
        *lock(&self.fails) = fails;
    }
}

impl Consumer for Taker {
    fn take(&self, effects: Effects, complete: Complete) -> Taking<'_> {
        Box::pin(async move {
            let fails = *lock(&self.fails);
            lock(&self.taken).push((effects, complete));
            let result = || if fails { Err("the kernel is away".to_owned()) } else { Ok(()) };
            Taken { nodes: result(), rows: result(), refused: Vec::new() }
        })
    }

    fn refused(&self) -> Pin<Box<dyn Future<Output = Vec<Refusal>> + Send + '_>> {
        Box::pin(async { Vec::new() })
    }
}

fn feed(directory: &TempDir) -> Arc<ClusterFeed> {
    Arc::new(ClusterFeed::new("a", directory.path(), None, directory.path()))
}

async fn load(feed: &ClusterFeed, boot: &str) {
    feed.load(boot).await;
    feed.load_rest().await;
}

fn opening(producer: &str, cluster: &str) -> Opening {
    Opening {
        producer: producer.to_owned(),
        cluster: cluster.to_owned(),
        kinds: BTreeSet::from([Kind::Node, Kind::Pod]),
    }
}

fn node(name: &str, n: u8) -> Change {
    Change::Put(Row::Node(FeedNode {
        name: name.to_owned(),
        uid: name.to_owned(),
        addresses: vec![[192, 0, 2, n].into()],
        pod_cidrs: Vec::new(),
        health_addresses: Vec::new(),
        router_addresses: Vec::new(),
    }))
}

fn pod(uid: &str, n: u8) -> Change {
    Change::Put(Row::Pod(FeedPod {
        uid: uid.into(),
        namespace: "shop".into(),
        name: "web".into(),
        addresses: [[10, 88, 0, n].into()].into(),
        node: "b".into(),
        labels: Arc::default(),
        named_ports: Arc::default(),
    }))
}

fn work(sequence: u64, changes: Vec<Change>) -> Work {
    Work::new(sequence, changes.into_iter().map(Read::Change).collect())
}

fn apply(feed: &ClusterFeed, stream: u64, mut work: Work) -> Result<v1::Processed, Status> {
    loop {
        match feed.apply(stream, &mut work)? {
            Step::More => {}
            Step::Wait(_) => panic!("the stream waits"),
            Step::Done(processed) => return Ok(processed),
        }
    }
}

fn snapshot(feed: &ClusterFeed, open: &Open) {
    let begin = Kind::ALL.into_iter().take(2).map(Change::Begin);
    let rows = [node("a", 1), node("b", 2), pod("one", 9)];
    let end = Kind::ALL.into_iter().take(2).map(Change::Complete);
    let changes = begin.chain(rows).chain(end).collect();
    let processed = apply(feed, open.stream, work(7, changes)).expect("processed");
    assert_eq!((processed.sequence, processed.refused), (7, Vec::new()));
}

fn rejected(feed: &Arc<ClusterFeed>, producer: &str, cluster: &str) -> String {
    match feed.open(&opening(producer, cluster)) {
        Err(NotOpen::Rejected(why)) => why,
        Err(NotOpen::Later(_)) => panic!("it is to wait"),
        Ok(_) => panic!("it is opened"),
    }
}

fn opened(feed: &Arc<ClusterFeed>, producer: &str, cluster: &str) -> Open {
    lock(&feed.inner).opened = None;
    match feed.open(&opening(producer, cluster)) {
        Ok(open) => open,
        Err(why) => panic!("{why:?}"),
    }
}

#[tokio::test]
async fn one_producer_has_the_feed_and_replaces_its_own_stream() {
    let directory = tempfile::tempdir().expect("directory");
    let feed = feed(&directory);
    let first = opened(&feed, "kube", "one");
    assert!(rejected(&feed, "other", "one").contains("producer \"kube\" has the feed"));
    let second = opened(&feed, "kube", "one");
    assert!(first.replaced.is_cancelled() && !second.replaced.is_cancelled());
    let late = apply(&feed, first.stream, work(1, vec![Change::Begin(Kind::Node)])).expect_err("replaced");
    assert_eq!(late.code(), tonic::Code::Aborted);
    drop(first);
    assert!(feed.view().connected_since_unix_ms.is_some(), "the end of the old stream ends the new one");
    drop(second);
    let other = opened(&feed, "other", "two");
    snapshot(&feed, &other);
    drop(other);
    assert!(feed.view().connected_since_unix_ms.is_none());
    let why = rejected(&feed, "other", "one");
    assert!(why.contains("rows of cluster \"two\", not of \"one\"") && why.contains("feed.json"), "{why}");
    assert!(matches!(feed.open(&opening("kube", "two")), Err(NotOpen::Later(_))), "openings have a rate");
    drop(opened(&feed, "kube", "two"));
}

#[tokio::test]
async fn watches_are_those_of_the_connected_stream_and_a_long_failure_is_a_problem() {
    let directory = tempfile::tempdir().expect("directory");
    let feed = feed(&directory);
    let open = opened(&feed, "kube", "one");
    snapshot(&feed, &open);
    let watch = |name: &str, state: &str, age| FeedWatch {
        name: name.to_owned(),
        state: state.to_owned(),
        since_unix_ms: clock::unix_ms() - age,
        error: Some("the API server answers 403".to_owned()),
    };
    let view = |watches: &[FeedWatch]| {
        feed.set_watches(open.stream, watches.to_vec());
        feed.view()
    };
    let one = [watch("Pod", "watching", 90_000), watch("Node", "failing", 30_000)];
    let found = view(&one);
    assert_eq!((found.watches, found.problem), (one.to_vec(), None));
    let all = ["Pod", "Node"].map(|name| watch(name, "failing", 61_000));
    let problem = view(&all).problem.unwrap_or_default();
    assert_eq!(
        problem,
        "the producer's watch of Pod fails: the API server answers 403; and 1 more (`wharf cluster feed`)"
    );
    let second = opened(&feed, "kube", "one");
    assert!(view(&all).watches.is_empty(), "of an earlier stream");
    feed.set_watches(second.stream, all.to_vec());
    drop(second);
    assert!(feed.view().watches.is_empty(), "without a producer");
}

#[tokio::test]
async fn changes_that_the_consumer_does_not_take_are_repeated_with_later_ones() {
    let directory = tempfile::tempdir().expect("directory");
    let (feed, taker) = (feed(&directory), Taker::default());
    let open = opened(&feed, "kube", "one");
    taker.fail(true);
    snapshot(&feed, &open);
    feed.take(&taker).await.expect_err("not taken");
    let view = feed.view();
    assert_eq!((view.processed, view.in_force), (Some(7), None));
    assert!(view.problem.is_some_and(|why| why.contains("the kernel is away")));
    let gone = Change::Delete(Key { kind: Kind::Pod, key: "one".to_owned() });
    apply(&feed, open.stream, work(8, vec![gone, pod("two", 8)])).expect("processed");
    taker.fail(false);
    feed.take(&taker).await.expect("taken");
    let (Effects { nodes, pods, .. }, _) = taker.last();
    let there: Vec<(&str, bool)> = pods.iter().map(|(uid, pod)| (&**uid, pod.is_some())).collect();
    assert_eq!((nodes, there), (true, vec![("one", false), ("two", true)]));
    let view = feed.view();
    assert_eq!((view.in_force, view.problem), (Some(8), None));
    assert!(feed.owner_of([10, 88, 0, 8].into()).is_some_and(|(pod, _)| &*pod.uid == "two"));
}

#[tokio::test]
async fn a_restart_keeps_the_rows_a_boot_forgets_pods_and_a_damaged_file_is_set_aside() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("feed.json");
    let inode = || std::fs::metadata(&file).expect("a file").ino();
    {
        let feed = feed(&directory);
        load(&feed, "boot").await;
        let open = opened(&feed, "kube", "one");
        snapshot(&feed, &open);
        feed.keep().await.expect("kept");
        let written = inode();
        repeat(&feed, &open);
        feed.keep().await.expect("kept");
        assert_eq!(written, inode(), "unchanged rows are written");
        apply(&feed, open.stream, work(9, vec![pod("one", 8), pod("one", 9), node("b", 3)])).expect("processed");
        feed.keep().await.expect("kept");
        assert_ne!(written, inode(), "a change is not written");
    }
    for (boot, pods) in [("boot", 1), ("another", 0)] {
        let (feed, taker) = (feed(&directory), Taker::default());
        load(&feed, boot).await;
        feed.take(&taker).await.expect("taken");
        let (taken, complete) = taker.last();
        assert_eq!((taken.nodes, taken.pods.values().flatten().count()), (true, pods), "{boot}");
        assert_eq!(complete, Complete { namespaces: true, ..Complete::default() }, "{boot}");
        assert_eq!(feed.nodes().0.len(), 2);
        assert!(rejected(&feed, "kube", "two").contains("\"one\""));
        let written = inode();
        feed.keep().await.expect("kept");
        assert_eq!(written == inode(), boot == "boot", "the rows of the file are written again: {boot}");
    }
    std::fs::write(&file, "{").expect("written");
    let feed = feed(&directory);
    load(&feed, "boot").await;
    assert!(!file.exists() && directory.path().join("feed.json.damaged").exists());
    assert!(feed.view().problem.is_some_and(|why| why.contains("feed.json.damaged")));
    let open = opened(&feed, "kube", "two");
    snapshot(&feed, &open);
    assert_eq!(feed.view().problem, None);
}

async fn written(directory: &TempDir) -> PathBuf {
    let feed = feed(directory);
    load(&feed, "boot").await;
    let open = opened(&feed, "kube", "one");
    snapshot(&feed, &open);
    feed.keep().await.expect("kept");
    directory.path().join("feed.json")
}

#[tokio::test]
async fn the_nodes_of_the_file_are_known_first_and_nothing_is_written_before_the_rest_is_read() {
    let directory = tempfile::tempdir().expect("directory");
    let file = written(&directory).await;
    std::fs::write(directory.path().join("feed.json.new"), "{").expect("written");
    let before = std::fs::read(&file).expect("read");
    let (feed, taker) = (feed(&directory), Taker::default());
    feed.load("boot").await;
    feed.nodes_are_taken();
    assert_eq!(feed.nodes().0.len(), 2);
    let view = feed.view();
    let kinds: Vec<&str> = view.rows.iter().map(|rows| rows.kind.as_str()).collect();
    assert_eq!((kinds, view.cluster.as_deref()), (vec!["node"], Some("one")), "other kinds have no number yet");
    assert!(view.problem.is_some_and(|why| why.contains("are being read from")));
    assert!(feed.restored().now_or_never().is_none());
    lock(&feed.inner).revision += 1;
    feed.keep().await.expect("nothing to do");
    assert_eq!(std::fs::read(&file).expect("read"), before, "the other rows are lost");
    feed.load_rest().await;
    feed.restored().await;
    assert_eq!(feed.view().rows.len(), Kind::ALL.len());
    feed.take(&taker).await.expect("taken");
    let (Effects { nodes, pods, .. }, _) = taker.last();
    assert_eq!((nodes, pods.len()), (false, 1), "the nodes are in force already");
    let inode = || std::fs::metadata(&file).expect("a file").ino();
    let same = inode();
    feed.keep().await.expect("kept");
    assert_eq!(inode(), same, "the rows of the file are written again");
}

#[tokio::test]
async fn when_only_the_nodes_can_be_read_they_stay_and_the_other_rows_are_not_known() {
    for damage in ["", "{\"label_sets\":[],\"pods\":[{\"uid\":\"o", "{}{}"] {
        let directory = tempfile::tempdir().expect("directory");
        let file = written(&directory).await;
        let text = std::fs::read_to_string(&file).expect("read");
        let (head, _) = text.split_once('\n').expect("two documents");
        assert!(head.contains("\"has_policies\":false"), "{head}");
        let head = head.replace("\"has_policies\":false", "\"has_policies\":true");
        std::fs::write(&file, format!("{head}\n{damage}")).expect("written");
        {
            let (feed, taker) = (feed(&directory), Taker::default());
            load(&feed, "boot").await;
            let problem = feed.view().problem.unwrap_or_default();
            assert!(problem.contains("second document") && problem.contains("feed.json.damaged"), "{problem}");
            assert!(!file.exists() && directory.path().join("feed.json.damaged").exists());
            assert_eq!((feed.nodes().0.len(), feed.view().rows.len()), (2, Kind::ALL.len()));
            feed.take(&taker).await.expect("taken");
            let (Effects { nodes, pods, .. }, complete) = taker.last();
            assert_eq!((nodes, pods.len(), complete), (true, 0, Complete::default()), "policies count as lost");
            assert!(rejected(&feed, "kube", "two").contains("\"one\""), "the nodes are of this cluster");
            feed.keep().await.expect("kept");
        }
        assert_eq!(restarted(&directory).await, Complete::default());
        let feed = feed(&directory);
        load(&feed, "boot").await;
        assert_eq!(feed.nodes().0.len(), 2, "the nodes are written");
        assert!(feed.view().problem.is_some_and(|why| why.contains("not every row")));
    }
}

#[tokio::test]
async fn a_file_of_an_earlier_version_is_read_and_one_with_an_unknown_label_set_is_set_aside() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("feed.json");
    let start = async |pod: &str, more: &str| {
        let pods =
            format!(r#"{{"uid":"one","namespace":"shop","name":"web","addresses":["10.88.0.9"],"node":"b",{pod}}}"#);
        let text = format!(
            r#"{{"boot_id":"boot","producer":"kube","cluster":"one","state":{{{more}"pods":[{pods}],"namespaces":[],"policies":[]}}}}"#
        );
        std::fs::write(&file, text).expect("written");
        let feed = feed(&directory);
        load(&feed, "boot").await;
        let owner = feed.owner_of([10, 88, 0, 9].into()).map(|(pod, _)| (pod.labels, pod.named_ports.len()));
        (owner, feed.view().problem.filter(|why| why.contains("feed.json.damaged")))
    };
    let labels = BTreeMap::from([("app".to_owned(), "web".to_owned())]);
    let earlier = start(r#""labels":{"app":"web"},"named_ports":[["tcp","http",80]]"#, "").await;
    assert_eq!(earlier, (Some((labels.clone().into(), 1)), None));
    let sets = r#""label_sets":[{"app":"web"}],"#;
    assert_eq!(start(r#""label_set":0"#, sets).await, (Some((labels.into(), 0)), None));
    let (owner, problem) = start(r#""label_set":1"#, sets).await;
    assert!(owner.is_none() && problem.is_some_and(|why| why.contains("pod \"one\" has no set of labels")));
    assert!(!file.exists());
}

fn namespace(name: &str) -> Change {
    Change::Put(Row::Namespace(FeedNamespace { name: name.to_owned(), labels: BTreeMap::new() }))
}

#[tokio::test]
async fn namespaces_are_complete_before_the_other_kinds_and_stay_so_over_a_restart() {
    let directory = tempfile::tempdir().expect("directory");
    let kinds = BTreeSet::from([Kind::Namespace, Kind::Policy]);
    {
        let (feed, taker) = (feed(&directory), Taker::default());
        load(&feed, "boot").await;
        let open = feed.open(&Opening { kinds: kinds.clone(), ..opening("kube", "one") });
        let Ok(open) = open else { panic!("it is not opened") };
        let step = async |sequence, changes, namespaces, when: &str| {
            apply(&feed, open.stream, work(sequence, changes)).expect("processed");
            feed.take(&taker).await.expect("taken");
            assert_eq!(taker.last().1, Complete { namespaces, ..Complete::default() }, "{when}");
            feed.keep().await.expect("kept");
        };
        step(1, vec![Change::Begin(Kind::Namespace), namespace("shop")], false, "a row").await;
        let kept = restarted(&directory).await;
        assert_eq!(kept, Complete::default(), "after a restart in the first snapshot");
        step(2, vec![Change::Complete(Kind::Namespace)], true, "complete, without a change of rows").await;
    }
    let kept = restarted(&directory).await;
    assert_eq!(kept, Complete { namespaces: true, ..Complete::default() }, "after a restart");
    let (feed, taker) = (feed(&directory), Taker::default());
    load(&feed, "boot").await;
    feed.take(&taker).await.expect("taken");
    let Ok(open) = feed.open(&Opening { kinds, ..opening("kube", "one") }) else { panic!("it is not opened") };
    apply(&feed, open.stream, work(1, vec![Change::Begin(Kind::Namespace), namespace("store")])).expect("processed");
    feed.take(&taker).await.expect("taken");
    assert!(taker.last().1.namespaces, "in a later snapshot");
}

fn policy(key: &str) -> Change {
    Change::Put(Row::Policy(FeedPolicy { key: key.to_owned(), text: "{}".to_owned() }))
}

fn of_policies(feed: &Arc<ClusterFeed>) -> Open {
    lock(&feed.inner).opened = None;
    let kinds = BTreeSet::from([Kind::Namespace, Kind::Policy]);
    match feed.open(&Opening { kinds, ..opening("kube", "one") }) {
        Ok(open) => open,
        Err(why) => panic!("{why:?}"),
    }
}

const BEGIN: [Change; 2] = [Change::Begin(Kind::Namespace), Change::Begin(Kind::Policy)];
const END: [Change; 2] = [Change::Complete(Kind::Namespace), Change::Complete(Kind::Policy)];

#[tokio::test]
async fn a_file_without_every_row_is_not_complete_at_the_next_starts() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("feed.json");
    std::fs::write(&file, "{").expect("written");
    {
        let (feed, taker) = (feed(&directory), Taker::default());
        load(&feed, "boot").await;
        let open = of_policies(&feed);
        apply(&feed, open.stream, work(1, BEGIN.into_iter().chain([policy("a")]).collect())).expect("processed");
        feed.take(&taker).await.expect("taken");
        assert!(file.exists(), "written before the policy takes effect");
    }
    for _ in 0..2 {
        let (feed, taker) = (feed(&directory), Taker::default());
        load(&feed, "boot").await;
        feed.take(&taker).await.expect("taken");
        assert!(!taker.last().1.all, "a part of the policies is taken for all");
        assert!(feed.view().problem.is_some_and(|why| why.contains("not every row")), "{:?}", feed.view().problem);
        feed.keep().await.expect("kept");
    }
    {
        let (feed, taker) = (feed(&directory), Taker::default());
        load(&feed, "boot").await;
        let open = of_policies(&feed);
        let rows = [policy("a"), policy("b"), namespace("shop")];
        let changes = BEGIN.into_iter().chain(rows).chain(END).collect();
        apply(&feed, open.stream, work(1, changes)).expect("processed");
        feed.take(&taker).await.expect("taken");
        assert!(taker.last().1.all && feed.view().problem.is_none(), "{:?}", feed.view().problem);
    }
    let complete = Complete { all: true, namespaces: true, ..Complete::default() };
    assert_eq!(restarted(&directory).await, complete);
    let written = std::fs::read_to_string(&file).expect("read");
    let (head, rest) = written.split_once('\n').expect("two documents");
    let [mut older, mut state] =
        [head, rest].map(|text| serde_json::from_str::<serde_json::Map<_, _>>(text).expect("JSON"));
    for field in ["has_namespaces", "has_policies", "is_complete"] {
        assert!(older.remove(field).is_some(), "{field}");
    }
    state.insert("nodes".to_owned(), older.remove("nodes").expect("nodes"));
    older.insert("state".to_owned(), state.into());
    std::fs::write(&file, serde_json::to_string_pretty(&older).expect("JSON")).expect("written");
    assert_eq!(restarted(&directory).await, complete, "of an earlier version");
    let broken = written.replace("\"b\"", "\"\"");
    assert_ne!(broken, written);
    std::fs::write(&file, broken).expect("written");
    for _ in 0..2 {
        let (feed, taker) = (feed(&directory), Taker::default());
        load(&feed, "boot").await;
        feed.take(&taker).await.expect("taken");
        assert_eq!(taker.last().1, Complete::default(), "not whole");
        feed.keep().await.expect("kept");
    }
    assert!(!std::fs::read_to_string(&file).expect("read").contains("\"\""), "the broken row is written");
}

/// A stream of every kind, complete or without the end of the policies.
fn of_every_kind(feed: &Arc<ClusterFeed>, is_complete: bool) -> Open {
    lock(&feed.inner).opened = None;
    lock(&feed.inner).begun.clear();
    let open = feed.open(&Opening { kinds: Kind::ALL.into(), ..opening("kube", "one") });
    let open = open.unwrap_or_else(|why| panic!("{why:?}"));
    let ended = Kind::ALL.into_iter().filter(|kind| is_complete || *kind != Kind::Policy);
    let rows = [node("a", 1), pod("one", 9)];
    let changes = Kind::ALL.map(Change::Begin).into_iter().chain(rows).chain(ended.map(Change::Complete)).collect();
    apply(feed, open.stream, work(1, changes)).expect("processed");
    open
}

#[tokio::test]
async fn every_row_is_there_after_a_complete_stream_until_the_boot() {
    let directory = tempfile::tempdir().expect("directory");
    {
        let new = feed(&directory);
        load(&new, "boot").await;
        drop(of_every_kind(&new, false));
        assert!(!new.has_every_row(), "the node has just joined");
        drop(of_every_kind(&new, true));
        assert!(new.has_every_row(), "without a producer");
        drop(of_every_kind(&new, false));
        assert!(new.has_every_row(), "a later stream lacks policies");
        new.keep().await.expect("kept");
    }
    {
        let restarted = feed(&directory);
        load(&restarted, "boot").await;
        assert!(restarted.has_every_row(), "of the kept file");
        let open = of_every_kind(&restarted, false);
        assert!(restarted.has_every_row());
        drop(open);
    }
    {
        let booted = feed(&directory);
        load(&booted, "next boot").await;
        assert!(!booted.has_every_row(), "the pods are forgotten");
        drop(of_every_kind(&booted, false));
        booted.keep().await.expect("kept");
    }
    let restarted = feed(&directory);
    load(&restarted, "next boot").await;
    assert!(!restarted.has_every_row(), "no stream of this boot was complete");
    drop(opened(&restarted, "kube", "one"));
    assert!(!restarted.has_every_row());
    lock(&restarted.inner).begun.clear();
    snapshot(&restarted, &opened(&restarted, "kube", "one"));
    assert!(restarted.has_every_row(), "every kind of this opening");
}

#[tokio::test]
async fn a_stream_without_policies_completes_no_policies() {
    let directory = tempfile::tempdir().expect("directory");
    let (feed, taker) = (feed(&directory), Taker::default());
    load(&feed, "boot").await;
    let open = opened(&feed, "kube", "one");
    snapshot(&feed, &open);
    feed.take(&taker).await.expect("taken");
    assert!(!taker.last().1.all, "nodes and pods are complete");
    drop(open);
    let open = of_policies(&feed);
    apply(&feed, open.stream, work(1, BEGIN.into_iter().chain(END).collect())).expect("processed");
    feed.take(&taker).await.expect("taken");
    assert!(taker.last().1.all);
    drop(open);
    drop(opened(&feed, "kube", "one"));
    feed.take(&taker).await.expect("taken");
    feed.keep().await.expect("kept");
    assert!(restarted(&directory).await.all, "a later stream without policies changes nothing");
}

#[tokio::test]
async fn policies_that_cannot_be_kept_are_not_taken() {
    let directory = tempfile::tempdir().expect("directory");
    let file = directory.path().join("feed.json");
    let (feed, taker) = (feed(&directory), Taker::default());
    load(&feed, "boot").await;
    let kinds = BTreeSet::from([Kind::Pod, Kind::Namespace, Kind::Policy]);
    let open = feed.open(&Opening { kinds, ..opening("kube", "one") }).unwrap_or_else(|why| panic!("{why:?}"));
    std::fs::create_dir(&file).expect("in the way of the file");
    apply(&feed, open.stream, work(1, BEGIN.into_iter().chain([policy("a")]).collect())).expect("processed");
    let why = feed.take(&taker).await.expect_err("not kept");
    assert!(why.contains("feed.json") && lock(&taker.taken).is_empty(), "{why}");
    assert_eq!((feed.view().in_force, feed.view().problem), (None, Some(why)));
    let mut own = pod("own", 2);
    if let Change::Put(Row::Pod(pod)) = &mut own {
        pod.node = "a".into();
    }
    let pods = [Change::Begin(Kind::Pod), pod("other", 1), own];
    apply(&feed, open.stream, work(2, pods.into())).expect("processed");
    feed.take(&taker).await.expect_err("not kept");
    let (taken, _) = taker.last();
    assert!(taken.policies.is_empty() && taken.pods.contains_key("other"), "of another node");
    assert!(!taken.pods.contains_key("own"), "no labels before their rules");
    std::fs::remove_dir(&file).expect("removed");
    feed.take(&taker).await.expect("taken");
    let (taken, _) = taker.last();
    assert!(taken.policies.contains_key("a") && taken.pods.contains_key("own"), "they are repeated");
    assert!(!taken.pods.contains_key("other"));
    assert_eq!(
        (feed.view().in_force, feed.view().problem.is_some_and(|why| why.contains("feed.json"))),
        (Some(2), false)
    );
}

#[tokio::test]
async fn a_refused_namespace_is_named_and_is_not_known_at_the_next_start() {
    let directory = tempfile::tempdir().expect("directory");
    let (feed, taker) = (feed(&directory), Taker::default());
    load(&feed, "boot").await;
    let open = of_policies(&feed);
    let labels = (0..257).map(|n| (format!("l{n}"), String::new())).collect();
    let large = Change::Put(Row::Namespace(FeedNamespace { name: "large".to_owned(), labels }));
    let changes = BEGIN.into_iter().chain([namespace("shop"), large]).chain(END).collect();
    apply(&feed, open.stream, work(1, changes)).expect("processed");
    feed.take(&taker).await.expect("taken");
    let complete =
        Complete { all: true, rows: true, namespaces: true, refused_namespaces: ["large".to_owned()].into() };
    assert_eq!(taker.last().1, complete);
    assert!(!restarted(&directory).await.namespaces, "its name is not kept");
    apply(&feed, open.stream, work(2, vec![namespace("large")])).expect("processed");
    feed.take(&taker).await.expect("taken");
    assert_eq!(taker.last().1, Complete { refused_namespaces: BTreeSet::new(), ..complete });
    assert!(restarted(&directory).await.namespaces);
}

#[tokio::test]
async fn refused_policies_are_listed_before_refused_pods() {
    let directory = tempfile::tempdir().expect("directory");
    let feed = feed(&directory);
    lock(&feed.inner).opened = None;
    let kinds = BTreeSet::from([Kind::Pod, Kind::Policy]);
    let Ok(open) = feed.open(&Opening { kinds, ..opening("kube", "one") }) else { panic!("it is not opened") };
    let begin = [Change::Begin(Kind::Pod), Change::Begin(Kind::Policy)].map(Read::Change);
    let unreadable = (0..2_000).map(|n| pod(&format!("p{n}"), 9)).chain([policy("a")]).map(|change| match change {
        Change::Put(row) => Read::Unreadable(row, "no row".to_owned()),
        other => panic!("{other:?}"),
    });
    apply(&feed, open.stream, Work::new(1, begin.into_iter().chain(unreadable).collect())).expect("processed");
    let (listed, all) = feed.refused(MAX_LISTED);
    assert_eq!((listed.len(), all), (MAX_LISTED, 2_001));
    assert_eq!(listed.first().map(|refusal| refusal.key.kind), Some(Kind::Policy));
}

async fn restarted(directory: &TempDir) -> Complete {
    let (feed, taker) = (feed(directory), Taker::default());
    load(&feed, "boot").await;
    feed.take(&taker).await.expect("taken");
    taker.last().1
}

fn repeat(feed: &ClusterFeed, open: &Open) {
    apply(feed, open.stream, work(8, vec![node("b", 2), pod("one", 9)])).expect("processed");
}

#[tokio::test(start_paused = true)]
async fn the_next_snapshot_of_a_kind_waits() {
    let directory = tempfile::tempdir().expect("directory");
    let feed = feed(&directory);
    let open = opened(&feed, "kube", "one");
    snapshot(&feed, &open);
    let mut again = work(8, vec![pod("two", 8), Change::Begin(Kind::Pod), Change::Complete(Kind::Pod)]);
    let Ok(Step::Wait(until)) = feed.apply(open.stream, &mut again) else { panic!("it does not wait") };
    assert!(feed.owner_of([10, 88, 0, 8].into()).is_some(), "what is before the snapshot is applied");
    tokio::time::sleep_until(until).await;
    let Ok(Step::Done(processed)) = feed.apply(open.stream, &mut again) else { panic!("it waits") };
    assert_eq!(processed.sequence, 8);
    assert!(feed.owner_of([10, 88, 0, 8].into()).is_none(), "the snapshot has no pods");
    drop(open);
    let open = opened(&feed, "kube", "one");
    let mut next = work(1, vec![Change::Begin(Kind::Pod)]);
    assert!(matches!(feed.apply(open.stream, &mut next), Ok(Step::Wait(_))));
}

#[tokio::test]
async fn refused_rows_are_listed_with_their_reasons() {
    let directory = tempfile::tempdir().expect("directory");
    let feed = feed(&directory);
    let open = opened(&feed, "kube", "one");
    snapshot(&feed, &open);
    let Change::Put(row) = node("b", 3) else { panic!("no row") };
    let unreadable = Read::Unreadable(row, "no address".to_owned());
    let processed = apply(&feed, open.stream, Work::new(8, vec![unreadable])).expect("processed");
    let row = processed.refused.first().expect("a refused row");
    assert_eq!((row.name.as_str(), row.reason.as_str(), row.stale), ("b", "no address", true));
    let view = feed.view();
    assert_eq!((view.refused_total, view.refused.first().map(|row| row.reason.as_str())), (1, Some("no address")));
    assert!(view.problem.is_some_and(|why| why == "refused node b: no address"));
    apply(&feed, open.stream, work(9, vec![node("b", 2)])).expect("processed");
    assert_eq!((feed.view().refused_total, feed.view().problem), (0, None));
    let early = apply(&feed, open.stream, work(10, vec![Change::Begin(Kind::Policy)])).expect_err("not opened");
    assert_eq!(early.code(), tonic::Code::InvalidArgument);
}
