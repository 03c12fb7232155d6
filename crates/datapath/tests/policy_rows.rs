//! Policy's tables: the contract of `change_policy` and `observe_policy` on the fake and on the real kernel, and what
//! only the real one can show.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "tests fail by panicking")]

mod support;

use std::{collections::BTreeMap, fs, net::Ipv4Addr};

use aya::maps::{
    Array, LpmTrie, Map, MapData,
    lpm_trie::{self, Key},
};
use ipnet::{IpNet, Ipv4Net};
use support::*;
use wharf_common::{
    CellKey, EndpointKey, PeerRow, PolicyState, PortKey, SetsRow,
    flow::{ICMPV6, TCP, UDP},
    map::IPCACHE_MAX,
    policy::{ACCEPT, DENY, Hit, PASS},
};
use wharf_core::{
    kernel::{Kernel, KernelErrorKind, NodeKernel, PolicyKernel},
    policy::{Cell, Judged, Mode, PolicyRows, PortRange, RowChange},
};

/// Makes a test of each function below for each world.
macro_rules! contract {
    ($($name:ident),+ $(,)?) => {
        mod fake { $( #[test] fn $name() { super::in_fake_world(super::$name) } )+ }
        mod linux { $( #[test] fn $name() { super::in_linux_world(None, super::$name) } )+ }
    };
}

contract! {
    rows_are_put_read_changed_and_removed,
    removing_what_is_not_there_succeeds,
    the_generation_grows_with_changes_alone,
    a_changed_address_has_a_generation_of_its_own,
    a_cell_that_is_there_keeps_its_counters,
    the_mode_is_written_with_the_rows,
    a_change_that_cannot_be_ends_the_changes_there,
    rows_go_with_the_node,
    rows_can_be_shown,
}

const AUDITS: Mode = Mode { keeps_flows: false, audits: true };

fn net(text: &str) -> IpNet {
    text.parse().expect("a network")
}

fn peer(text: &str, class: u32) -> RowChange {
    RowChange::Peer(net(text), Some(PeerRow { identity: 2, class }))
}

fn ports(set: u32, protocol: u8, first: u16, length: u8) -> PortRange {
    PortRange { set, protocol, first, length }
}

fn hit(rank: u32, ruling: u32) -> Hit {
    Hit { rank, rule: rank + 100, ruling }
}

const CELL: CellKey = CellKey { set: 3, class: 1, port: 2 };

fn cell(rank: u32) -> Cell {
    Cell { admin: hit(rank, PASS), rest: hit(rank + 1, DENY) }
}

async fn rows(k: &impl Kernel) -> PolicyRows {
    k.observe_policy().await.expect("observe")
}

async fn change(k: &impl Kernel, changes: Vec<RowChange>) {
    k.change_policy(changes, Mode::default()).await.expect("change");
}

async fn rows_are_put_read_changed_and_removed<W: World>(w: W) {
    let k = w.kernel();
    assert_eq!(rows(k).await, PolicyRows::default());
    let (first, last) = (id(1), id(16_383));
    let set = SetsRow { ingress: 3, egress: 0 };
    change(
        k,
        vec![
            peer("0.0.0.0/0", 1),
            peer("::/0", 2),
            peer("10.1.2.3/8", 3),
            peer("10.1.2.3/32", 4),
            peer("fd00::5/64", 5),
            RowChange::Ports(ports(3, TCP, 80, 16), Some(1)),
            RowChange::Ports(ports(3, TCP, 8_081, 12), Some(2)),
            RowChange::Ports(ports(3, ICMPV6, 0, 0), Some(3)),
            RowChange::Ports(ports(4, UDP, 80, 16), Some(4)),
            RowChange::Cell(CELL, Some(cell(7))),
            RowChange::Cell(CellKey::default(), Some(Cell { admin: Hit::NONE, rest: hit(1, ACCEPT) })),
            RowChange::Sets(first, set),
            RowChange::Sets(last, set),
        ],
    )
    .await;
    let class = |class| PeerRow { identity: 2, class };
    let mut want = PolicyRows {
        sets: [(first, set), (last, set)].into(),
        peers: [("0.0.0.0/0", 1), ("::/0", 2), ("10.0.0.0/8", 3), ("10.1.2.3/32", 4), ("fd00::/64", 5)]
            .map(|(text, n)| (net(text), class(n)))
            .into(),
        ports: BTreeMap::from([
            (ports(3, TCP, 80, 16), 1),
            (ports(3, TCP, 8_080, 12), 2),
            (ports(3, ICMPV6, 0, 0), 3),
            (ports(4, UDP, 80, 16), 4),
        ]),
        cells: BTreeMap::from([
            (CELL, (cell(7), Judged::default())),
            (CellKey::default(), (Cell { admin: Hit::NONE, rest: hit(1, ACCEPT) }, Judged::default())),
        ]),
        generation: 1,
    };
    assert_eq!(rows(k).await, want);
    // Other values, and in the notation of another host.
    change(
        k,
        vec![
            peer("10.9.9.9/8", 6),
            RowChange::Ports(ports(3, TCP, 8_095, 12), Some(5)),
            RowChange::Cell(CELL, Some(cell(9))),
            RowChange::Sets(first, SetsRow { ingress: 0, egress: 4 }),
        ],
    )
    .await;
    want.peers.insert(net("10.0.0.0/8"), class(6));
    want.ports.insert(ports(3, TCP, 8_080, 12), 5);
    want.cells.insert(CELL, (cell(9), Judged::default()));
    want.sets.insert(first, SetsRow { ingress: 0, egress: 4 });
    want.generation = 2;
    assert_eq!(rows(k).await, want);
    // A shorter prefix goes, a longer one stays; the last change of a row counts.
    change(
        k,
        vec![
            RowChange::Peer(net("10.0.0.0/8"), None),
            RowChange::Ports(ports(3, ICMPV6, 0, 0), None),
            RowChange::Cell(CELL, None),
            RowChange::Sets(first, SetsRow::default()),
            peer("::/0", 7),
            RowChange::Peer(net("::/0"), None),
        ],
    )
    .await;
    want.peers.retain(|n, _| ![net("10.0.0.0/8"), net("::/0")].contains(n));
    want.ports.remove(&ports(3, ICMPV6, 0, 0));
    want.cells.remove(&CELL);
    want.sets.remove(&first);
    want.generation = 3;
    assert_eq!(rows(k).await, want);
}

async fn removing_what_is_not_there_succeeds<W: World>(w: W) {
    let k = w.kernel();
    // A shorter and a longer prefix are no match.
    change(k, vec![peer("10.0.0.0/8", 1), peer("10.1.0.0/24", 1)]).await;
    let before = rows(k).await;
    change(
        k,
        vec![
            RowChange::Peer(net("10.1.0.0/16"), None),
            RowChange::Ports(ports(3, TCP, 80, 16), None),
            RowChange::Cell(CELL, None),
            RowChange::Sets(id(1), SetsRow::default()),
        ],
    )
    .await;
    assert_eq!(rows(k).await, PolicyRows { generation: 2, ..before });
}

async fn the_generation_grows_with_changes_alone<W: World>(w: W) {
    let k = w.kernel();
    let generation = async || rows(k).await.generation;
    change(k, vec![]).await;
    assert_eq!(generation().await, 0);
    k.change_policy(vec![], AUDITS).await.expect("the mode alone");
    assert_eq!(generation().await, 0, "there is no policy yet");
    change(k, vec![peer("::/0", 1), peer("fd00::/8", 1)]).await;
    assert_eq!(generation().await, 1, "once for all of them");
    change(k, vec![]).await;
    assert_eq!(generation().await, 1);
    change(k, vec![peer("::/0", 1)]).await;
    assert_eq!(generation().await, 2);
    k.change_policy(vec![], AUDITS).await.expect("the mode alone");
    assert_eq!(generation().await, 3, "what another mode let pass is judged again");
    k.change_policy(vec![], AUDITS).await.expect("the same mode");
    assert_eq!(generation().await, 3);
}

async fn a_changed_address_has_a_generation_of_its_own<W: World>(w: W) {
    let k = w.kernel();
    let generations = async || {
        let rows = k.dump_map("ADDRESS_GENERATIONS").await.expect("generations");
        let column = |row: &BTreeMap<String, String>, name: &str| row.get(name).expect("column").clone();
        let slots: Vec<_> =
            rows.iter().map(|row| format!("{}:{}", column(row, "slot"), column(row, "generation"))).collect();
        format!("{} {}", self::rows(k).await.generation, slots.join(" "))
    };
    change(k, vec![peer("10.0.1.2/32", 1)]).await;
    assert_eq!(generations().await, "1 ", "before any policy, flows have no generation");
    change(k, vec![peer("10.0.1.2/32", 2)]).await;
    assert_eq!(generations().await, "1 258:1");
    let both = [RowChange::Peer(net("10.0.1.2/32"), None), peer("fd00::7/128", 1), peer("10.16.0.7/32", 1)];
    change(k, both.to_vec()).await;
    assert_eq!(generations().await, "1 7:1 258:2", "once for each slot");
    change(k, vec![peer("10.0.1.2/32", 1), peer("10.0.1.0/24", 1)]).await;
    assert_eq!(generations().await, "2 7:1 258:2", "a network concerns flows of every slot");
    k.change_policy(vec![peer("10.0.1.2/32", 3)], AUDITS).await.expect("another mode");
    assert_eq!(generations().await, "3 7:1 258:2");
    k.change_policy(vec![peer("10.0.1.2/32", 4)], AUDITS).await.expect("the same mode");
    assert_eq!(generations().await, "3 7:1 258:3");
}

async fn a_cell_that_is_there_keeps_its_counters<W: World>(w: W) {
    let k = w.kernel();
    let put = |rank| RowChange::Cell(CELL, Some(cell(rank)));
    change(k, vec![put(1)]).await;
    let judged = Judged { packets: 7, bytes: 700 };
    w.set_judged(&CELL, judged);
    for rank in [1, 2] {
        change(k, vec![put(rank)]).await;
        assert_eq!(rows(k).await.cells, BTreeMap::from([(CELL, (cell(rank), judged))]));
    }
    change(k, vec![RowChange::Cell(CELL, None), put(2)]).await;
    assert_eq!(rows(k).await.cells, BTreeMap::from([(CELL, (cell(2), Judged::default()))]), "a new one begins anew");
}

async fn the_mode_is_written_with_the_rows<W: World>(w: W) {
    let k = w.kernel();
    let state = async || {
        let rows = k.dump_map("POLICY_STATE").await.expect("state");
        let column = |name: &str| rows[0].get(name).expect("column").clone();
        format!("{} {}", column("generation"), column("flags"))
    };
    assert_eq!(state().await, "0 ");
    k.change_policy(vec![peer("::/0", 1)], AUDITS).await.expect("change");
    assert_eq!(state().await, "1 audits");
    k.change_policy(vec![], Mode { keeps_flows: true, ..AUDITS }).await.expect("change");
    assert_eq!(state().await, "2 keeps-flows,audits");
    k.change_policy(vec![], Mode::default()).await.expect("change");
    assert_eq!(state().await, "3 ");
}

async fn a_change_that_cannot_be_ends_the_changes_there<W: World>(w: W) {
    let k = w.kernel();
    let pass = Cell { admin: Hit::NONE, rest: hit(1, PASS) };
    let invalid = [
        (peer("::ffff:10.0.0.0/104", 1), "::ffff:10.0.0.0/104"),
        (RowChange::Ports(ports(3, TCP, 80, 17), Some(1)), "port class of 80"),
        (RowChange::Ports(ports(3, 47, 80, 16), Some(1)), "protocol 47"),
        (RowChange::Cell(CELL, Some(pass)), "the cell of peer class 1, port class 2, rule set 3"),
    ];
    for (n, (change, subject)) in (1..).zip(invalid) {
        let refused = k.change_policy(vec![change], AUDITS).await.expect_err(subject);
        assert_eq!(rows(k).await.generation, n - 1, "nothing has changed: {subject}");
        assert!(refused.to_string().contains(subject), "{refused}");
        let three = vec![peer("10.0.0.0/8", n), change, peer("192.0.2.0/24", n)];
        k.change_policy(three, AUDITS).await.expect_err(subject);
        let rows = rows(k).await;
        assert_eq!(rows.peers, BTreeMap::from([(net("10.0.0.0/8"), PeerRow { identity: 2, class: n })]), "{subject}");
        assert_eq!(rows.generation, n, "one row has changed");
    }
    let state = k.dump_map("POLICY_STATE").await.expect("state");
    assert_eq!(state[0].get("flags").map(String::as_str), Some(""), "the mode is that of before");
}

async fn rows_go_with_the_node<W: World>(w: W) {
    let k = w.kernel();
    k.ensure_node(&node_spec()).await.expect("node");
    k.change_policy(vec![peer("::/0", 1), RowChange::Cell(CELL, Some(cell(1)))], AUDITS).await.expect("change");
    k.remove_node().await.expect("node gone");
    k.ensure_node(&node_spec()).await.expect("node again");
    assert_eq!(rows(k).await, PolicyRows::default());
    change(k, vec![]).await;
    assert_eq!(rows(k).await.generation, 0, "the mode is the default again");
    k.remove_node().await.expect("node gone");
}

async fn rows_can_be_shown<W: World>(w: W) {
    let k = w.kernel();
    change(
        k,
        vec![
            peer("10.0.0.0/8", 1),
            RowChange::Ports(ports(3, TCP, 8_080, 12), Some(2)),
            RowChange::Cell(CELL, Some(Cell { admin: Hit::NONE, rest: hit(7, DENY) })),
            RowChange::Sets(id(5), SetsRow { ingress: 3, egress: 0 }),
        ],
    )
    .await;
    w.set_judged(&CELL, Judged { packets: 7, bytes: 700 });
    for (map, want) in [
        ("IPCACHE", "class=1 identity=2 prefix=10.0.0.0/8"),
        ("POLICY_PORTS", "class=2 ports=8080-8095 protocol=6 set=3"),
        ("POLICY_CELLS", "admin= bytes=700 class=1 packets=7 port_class=2 rest=deny rule 107 rank 7 set=3"),
        ("POLICY_SETS", "egress=0 endpoint=5 ingress=3"),
        ("POLICY_STATE", "flags= generation=1"),
    ] {
        let rows = k.dump_map(map).await.expect(map);
        let shown: Vec<String> = rows
            .iter()
            .map(|row| row.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(shown, [want], "{map}");
    }
}

/// A map that is pinned for all versions.
fn pinned(w: &LinuxWorld, name: &str) -> MapData {
    MapData::from_pin(w.pins().join("shared").join(name)).expect("a pinned map")
}

#[test]
fn a_hundred_thousand_peers_fit_and_a_full_table_is_told() {
    in_linux_world(None, |w| async move {
        let k = w.kernel();
        let peers = |from: u32, to: u32| -> Vec<RowChange> {
            let net = |n| IpNet::V4(Ipv4Net::from(Ipv4Addr::from_bits(0x0a00_0000 + n)));
            (from..to).map(|n| RowChange::Peer(net(n), Some(PeerRow { identity: 2, class: n }))).collect()
        };
        let began = std::time::Instant::now();
        change(k, peers(0, 100_000)).await;
        let (written, began) = (began.elapsed(), std::time::Instant::now());
        let there = rows(k).await;
        eprintln!("written in {written:?}, read in {:?}", began.elapsed());
        assert_eq!((there.peers.len(), there.generation), (100_000, 1));
        assert_eq!(there.peers.get(&net("10.1.134.159/32")), Some(&PeerRow { identity: 2, class: 99_999 }));
        let refused = k.change_policy(peers(100_000, IPCACHE_MAX + 2), AUDITS).await.expect_err("one too many");
        assert_eq!(refused.kind, KernelErrorKind::Exhausted, "{refused}");
        for part in ["10.8.0.0/32", "IPCACHE is full (524288 rows)", "remove policies"] {
            assert!(refused.to_string().contains(part), "{part} is missing in: {refused}");
        }
        let there = rows(k).await;
        assert_eq!((there.peers.len(), there.generation), (IPCACHE_MAX as usize, 2));
        let gone = there.peers.keys().map(|net| RowChange::Peer(*net, None)).collect();
        change(k, gone).await;
        assert_eq!(rows(k).await, PolicyRows { generation: 2, ..PolicyRows::default() });
    });
}

/// As an agent leaves it that is killed between two rows, or between the last row and the generation.
#[test]
fn a_change_that_was_cut_off_makes_the_generation_grow_at_the_next_one() {
    in_linux_world(None, |w| async move {
        let mut state: Array<_, PolicyState> = Map::Array(pinned(&w, "POLICY_STATE")).try_into().expect("state");
        let (kernel, many) = (w.kernel.clone(), (0..20_000).map(|n| peer("::/0", n)).collect());
        let changes = tokio::spawn(async move { kernel.change_policy(many, Mode::default()).await });
        let mut during = state.get(&0, 0).expect("state");
        while during == PolicyState::default() {
            during = state.get(&0, 0).expect("state");
        }
        assert_eq!(during.generation, 0, "rows change");
        changes.await.expect("task").expect("change");
        assert_eq!(state.get(&0, 0).expect("state"), PolicyState { generation: 1, flags: 0 });
        for generation in [0, 7] {
            state.set(0, PolicyState { generation, ..during }, 0).expect("set");
            change(&w.kernel, vec![]).await;
            assert_eq!(state.get(&0, 0).expect("state"), PolicyState { generation: generation + 1, flags: 0 });
        }
        // A change that fails at its first row leaves that to the next one.
        state.set(0, during, 0).expect("set");
        let invalid = RowChange::Ports(ports(3, 47, 80, 16), None);
        w.kernel.change_policy(vec![invalid], Mode::default()).await.expect_err("no such protocol");
        assert_eq!(state.get(&0, 0).expect("state"), during);
        w.kernel.change_policy(vec![peer("::/0", 1), invalid], AUDITS).await.expect_err("no such protocol");
        assert_eq!(state.get(&0, 0).expect("state"), PolicyState { generation: 1, flags: 0 });
    });
}

#[test]
fn a_generation_at_its_end_begins_with_one() {
    in_linux_world(None, |w| async move {
        let mut state: Array<_, PolicyState> = Map::Array(pinned(&w, "POLICY_STATE")).try_into().expect("state");
        state.set(0, PolicyState { generation: u32::MAX, flags: 0 }, 0).expect("set");
        change(&w.kernel, vec![peer("::/0", 1)]).await;
        assert_eq!(rows(&w.kernel).await.generation, 1);
    });
}

#[test]
fn a_row_that_makes_no_sense_is_told() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        let told = async |row: &str, map: &str| {
            for result in [k.observe_policy().await.map(drop), k.dump_map(map).await.map(drop)] {
                let refused = result.expect_err(row);
                assert_eq!(refused.kind, KernelErrorKind::Conflict, "{refused}");
                assert!(refused.to_string().contains(&format!("{row} in {map}")), "{refused}");
            }
        };
        let mut peers: LpmTrie<_, EndpointKey, PeerRow> =
            Map::LpmTrie(pinned(&w, "IPCACHE")).try_into().expect("peers");
        let odd = Key::new(64, EndpointKey::v4([10, 0, 0, 1]));
        peers.insert(&odd, PeerRow::default(), 0).expect("insert");
        told("::ffff:10.0.0.1/64", "IPCACHE").await;
        peers.remove(&odd).expect("remove");
        let mut ports: LpmTrie<_, PortKey, u32> = Map::LpmTrie(pinned(&w, "POLICY_PORTS")).try_into().expect("ports");
        for (length, protocol, row) in [(64, 47, "protocol 47, port 80, 64 bits"), (40, TCP, "port 80, 40 bits")] {
            let odd = lpm_trie::Key::new(length, PortKey { set: 3, protocol, _pad: 0, port: 80_u16.to_be_bytes() });
            ports.insert(&odd, 1, 0).expect("insert");
            told(row, "POLICY_PORTS").await;
            ports.remove(&odd).expect("remove");
        }
        assert_eq!(rows(k).await, PolicyRows::default());
    });
}

#[test]
fn another_table_in_the_place_of_ours_is_not_written() {
    in_linux_world(None, |w| async move {
        let k = &w.kernel;
        let path = w.pins().join("shared/IPCACHE");
        fs::remove_file(&path).expect("unpin");
        let other = LpmTrie::<MapData, EndpointKey, PeerRow>::create(IPCACHE_MAX, 1).expect("another of that shape");
        other.pin(&path).expect("pin");
        k.change_policy(vec![peer("::/0", 1)], AUDITS).await.expect("the table that the programs use");
        assert_eq!(rows(k).await.peers.len(), 1);
        let other: LpmTrie<_, EndpointKey, PeerRow> = Map::LpmTrie(pinned(&w, "IPCACHE")).try_into().expect("peers");
        assert_eq!(other.keys().count(), 0, "the table that is pinned now");
    });
}
