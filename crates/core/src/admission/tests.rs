#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

/// Creates start in turn as soon as admission allows.
struct Node {
    admission: Admission,
    now_ms: u64,
    waiting: VecDeque<Ticket>,
    running: Vec<(u64, Ticket)>,
}

impl Node {
    fn new(config: AdmissionConfig) -> Self {
        Self { admission: Admission::new(config), now_ms: 1_000, waiting: VecDeque::new(), running: Vec::new() }
    }

    fn offer(&mut self, patience_ms: u64) -> Result<(), Refusal> {
        let ticket = self.admission.offer(patience_ms, self.now_ms)?;
        self.waiting.push_back(ticket);
        Ok(())
    }

    fn start(&mut self, takes_ms: u64) {
        while self.admission.may_start(self.now_ms) {
            let ticket = self.waiting.pop_front().unwrap();
            let ticket = self.admission.on_start(ticket, self.now_ms);
            self.running.push((self.now_ms + takes_ms, ticket));
        }
    }

    fn step(&mut self) {
        let at = (0..self.running.len()).min_by_key(|at| self.running[*at].0).unwrap();
        let (end_ms, ticket) = self.running.swap_remove(at);
        self.now_ms = self.now_ms.max(end_ms);
        self.admission.on_end(ticket, self.now_ms);
    }

    fn busy(&mut self, creates: usize, takes_ms: u64) {
        for _ in 0..creates {
            while self.waiting.len() < 8 && self.offer(u64::MAX).is_ok() {}
            self.start(takes_ms);
            self.step();
        }
    }

    fn drain(&mut self, takes_ms: u64) -> u64 {
        let from_ms = self.now_ms;
        self.start(takes_ms);
        while !self.running.is_empty() {
            self.step();
            self.start(takes_ms);
        }
        self.now_ms - from_ms
    }

    fn give_up(&mut self) {
        let running = self.running.drain(..).map(|(_, ticket)| ticket);
        for ticket in self.waiting.drain(..).chain(running) {
            self.admission.on_abandon(ticket, self.now_ms);
        }
    }

    fn predicted_ms(&self) -> u64 {
        self.admission.predicted_wait_ms(self.now_ms)
    }

    fn view(&self) -> AdmissionView {
        self.admission.view(self.now_ms)
    }
}

fn node() -> Node {
    Node::new(AdmissionConfig::default())
}

#[test]
fn with_room_nobody_waits_and_without_each_waits_its_turn() {
    let mut node = node();
    for n in 0..8 {
        assert_eq!(node.predicted_ms(), 0, "create {n}");
        node.offer(0).unwrap();
    }
    assert_eq!(node.predicted_ms(), 10);
    node.start(100);
    assert_eq!((node.view().waiting, node.view().running), (0, 8));
    node.offer(10).unwrap();
    assert!(!node.admission.may_start(node.now_ms));
    assert_eq!(node.predicted_ms(), 20);
    let refusal = node.offer(19).unwrap_err();
    assert_eq!(refusal, Refusal { predicted_wait_ms: 20, retry_after_ms: 50, waiting: 1, cost_ms: 10 });
    assert_eq!(
        refusal.to_string(),
        "1 creates wait and one ends every 10 ms: its turn would come in 20 ms; ask again in 50 ms"
    );
    node.step();
    assert!(node.admission.may_start(node.now_ms));
}

#[test]
fn what_is_predicted_is_about_what_comes() {
    for (takes_ms, waiting) in [(8, 200), (80, 200), (800, 60)] {
        let mut node = node();
        node.busy(100, takes_ms);
        node.drain(takes_ms);
        for _ in 0..waiting {
            node.offer(u64::MAX).unwrap();
        }
        node.start(takes_ms);
        let predicted = node.predicted_ms();
        let came = node.drain(takes_ms);
        assert!((came / 2..=came * 2).contains(&predicted), "predicted {predicted} ms, it took {came} ms");
    }
}

#[test]
fn a_slow_node_refuses_those_that_cannot_wait_and_says_when_to_ask() {
    let mut node = node();
    node.busy(200, 4_000);
    assert_eq!(node.view().cost_ms, 500);
    while node.offer(5_000).is_ok() {}
    let refusal = node.offer(5_000).unwrap_err();
    assert!((5_000..=5_500).contains(&refusal.predicted_wait_ms), "{refusal}");
    assert_eq!(refusal.retry_after_ms, 500);
    while node.offer(u64::MAX).is_ok() {}
    assert!((10_000..=10_500).contains(&node.predicted_ms()));
    assert_eq!(node.offer(0).unwrap_err().retry_after_ms, 5_000);
}

#[test]
fn a_node_on_which_nothing_ends_is_seen_as_such_before_anything_has_ended() {
    let mut node = node();
    (0..8).for_each(|_| node.offer(0).unwrap());
    node.start(u64::MAX / 2);
    node.offer(2_000).unwrap();
    node.now_ms += 8_000;
    assert_eq!(node.view().cost_ms, 1_000);
    assert_eq!(node.offer(1_999).unwrap_err().predicted_wait_ms, 2_000);
    assert_eq!(node.view().longest_running_ms, 8_000);
    assert_eq!(node.view().longest_waiting_ms, 8_000);
}

#[test]
fn one_slow_create_is_soon_forgotten() {
    let mut node = node();
    node.busy(100, 80);
    let usual = node.view().cost_ms;
    let (slow, quick) = (node.now_ms + 10_000, 80);
    while node.offer(u64::MAX).is_ok_and(|()| node.waiting.len() < 8) {}
    node.start(quick);
    node.running.last_mut().unwrap().0 = slow;
    while node.now_ms < slow {
        node.busy(1, quick);
    }
    assert!(node.view().cost_ms <= usual * 2, "{:?}, it was {usual} ms", node.view());
}

#[test]
fn a_bad_time_is_forgotten_while_busy_and_while_idle() {
    let bad = || {
        let mut node = node();
        node.busy(100, 8_000);
        node.drain(8_000);
        assert!(node.view().cost_ms >= 900, "{:?}", node.view());
        node
    };
    let mut node = bad();
    node.busy(200, 80);
    assert!(node.view().cost_ms <= 11, "{:?}", node.view());
    let mut node = bad();
    node.now_ms += 120_000;
    assert!(node.view().cost_ms <= 11, "{:?}", node.view());
}

#[test]
fn a_node_that_refuses_all_who_would_wait_learns_that_it_is_quick_again() {
    let mut node = node();
    node.busy(100, 80_000);
    node.give_up();
    (0..8).for_each(|_| node.offer(0).unwrap());
    assert!(node.offer(9_000).is_err(), "{:?}", node.view());
    node.drain(8);
    for _ in 0..50 {
        while node.offer(0).is_ok() {}
        node.drain(8);
    }
    (0..8).for_each(|_| node.offer(0).unwrap());
    node.offer(1_000).unwrap();
}

#[test]
fn so_many_wait_and_no_more() {
    let mut node = Node::new(AdmissionConfig { most_waiting: 3, ..AdmissionConfig::default() });
    (0..8).for_each(|_| node.offer(0).unwrap());
    node.start(100);
    (0..3).for_each(|_| node.offer(u64::MAX).unwrap());
    assert_eq!(node.offer(u64::MAX).unwrap_err().waiting, 3);
    let ticket = node.waiting.pop_back().unwrap();
    node.admission.on_abandon(ticket, node.now_ms);
    node.offer(u64::MAX).unwrap();
}

#[test]
fn while_deletes_run_fewer_creates_do_but_none_starves() {
    let mut node = node();
    node.admission.delete_began(3, node.now_ms);
    (0..4).for_each(|_| node.offer(1_000).unwrap());
    node.start(60_000);
    assert_eq!((node.view().running, node.view().waiting, node.view().deletes), (2, 2, 3));
    node.now_ms += 1_999;
    assert!(!node.admission.may_start(node.now_ms));
    node.now_ms += 1;
    node.start(60_000);
    assert_eq!((node.view().running, node.view().waiting), (4, 0));

    node.offer(u64::MAX).unwrap();
    node.admission.delete_ended(2, node.now_ms);
    assert!(!node.admission.may_start(node.now_ms));
    node.admission.delete_ended(1, node.now_ms);
    assert!(node.admission.may_start(node.now_ms));
}

#[test]
fn deletes_that_run_are_part_of_the_wait() {
    let mut node = node();
    for _ in 0..40 {
        node.admission.delete_began(2, node.now_ms);
        node.now_ms += 100;
        node.admission.delete_ended(2, node.now_ms);
    }
    assert_eq!(node.view().delete_cost_ms, 50);
    node.admission.delete_began(4, node.now_ms);
    (0..2).for_each(|_| node.offer(0).unwrap());
    assert_eq!(node.predicted_ms(), 4 * 50 + 10);
    node.admission.delete_began(400, node.now_ms);
    assert_eq!(node.predicted_ms(), 2_000 + 10);
    node.admission.delete_ended(500, node.now_ms);
    assert_eq!(node.view().deletes, 0);
}

#[test]
fn limits_of_nothing_are_limits_of_one() {
    let config = AdmissionConfig { parallel: 0, parallel_while_deleting: 0, most_waiting: 0, ..Default::default() };
    let mut node = Node::new(config);
    node.admission.delete_began(1, node.now_ms);
    node.offer(0).unwrap();
    node.start(1);
    assert_eq!(node.view().running, 1);
    assert!(node.offer(u64::MAX).is_err());
}

#[derive(Debug, Clone)]
enum Op {
    Offer(u64),
    Start,
    End(usize),
    AbandonWaiting(usize),
    AbandonRunning(usize),
    DeletesBegin(u32),
    DeletesEnd(u32),
    Pass(u64),
}

fn any_op() -> impl Strategy<Value = Op> {
    let patience = prop_oneof![Just(0), 0u64..20_000, Just(u64::MAX)];
    let pass = prop_oneof![0u64..50, 0u64..20_000, Just(3_600_000)];
    prop_oneof![
        6 => patience.prop_map(Op::Offer),
        6 => Just(Op::Start),
        5 => any::<usize>().prop_map(Op::End),
        1 => any::<usize>().prop_map(Op::AbandonWaiting),
        1 => any::<usize>().prop_map(Op::AbandonRunning),
        1 => (0u32..50).prop_map(Op::DeletesBegin),
        1 => (0u32..50).prop_map(Op::DeletesEnd),
        4 => pass.prop_map(Op::Pass),
    ]
}

proptest! {
    #[test]
    fn an_idle_node_never_refuses(ops in prop::collection::vec(any_op(), 1..300), most_waiting in 0u32..20) {
        let config = AdmissionConfig { most_waiting, ..AdmissionConfig::default() };
        let mut node = Node::new(config);
        let mut deletes = 0u32;
        for op in ops {
            match op {
                Op::Offer(patience_ms) => {
                    let idle = node.waiting.is_empty() && node.running.is_empty();
                    if let Err(refusal) = node.offer(patience_ms) {
                        prop_assert!(!idle, "{refusal}");
                        prop_assert!(RETRY_AFTER_MS.contains(&refusal.retry_after_ms), "{refusal}");
                        let for_time = refusal.predicted_wait_ms > patience_ms.min(config.longest_wait_ms);
                        prop_assert!(for_time || refusal.waiting >= most_waiting, "{refusal}");
                    }
                }
                Op::Start => {
                    if node.admission.may_start(node.now_ms) {
                        let ticket = node.waiting.pop_front().unwrap();
                        let ticket = node.admission.on_start(ticket, node.now_ms);
                        node.running.push((node.now_ms, ticket));
                    }
                }
                Op::End(at) if !node.running.is_empty() => {
                    let (_, ticket) = node.running.swap_remove(at % node.running.len());
                    node.admission.on_end(ticket, node.now_ms);
                }
                Op::AbandonWaiting(at) if !node.waiting.is_empty() => {
                    let ticket = node.waiting.remove(at % node.waiting.len()).unwrap();
                    node.admission.on_abandon(ticket, node.now_ms);
                }
                Op::AbandonRunning(at) if !node.running.is_empty() => {
                    let (_, ticket) = node.running.swap_remove(at % node.running.len());
                    node.admission.on_abandon(ticket, node.now_ms);
                }
                Op::DeletesBegin(n) => {
                    node.admission.delete_began(n, node.now_ms);
                    deletes += n;
                }
                Op::DeletesEnd(n) => {
                    node.admission.delete_ended(n, node.now_ms);
                    deletes = deletes.saturating_sub(n);
                }
                Op::Pass(ms) => node.now_ms += ms,
                Op::End(_) | Op::AbandonWaiting(_) | Op::AbandonRunning(_) => {}
            }
            let view = node.view();
            prop_assert_eq!(view.waiting as usize, node.waiting.len());
            prop_assert_eq!(view.running as usize, node.running.len());
            prop_assert_eq!(view.deletes, deletes);
            prop_assert!(view.running <= config.parallel);
            // While there is room, the queue has no bound.
            prop_assert!(view.waiting <= most_waiting.max(config.parallel));
            prop_assert!(view.cost_ms >= 1 && view.delete_cost_ms >= 1);
        }
        while let Some(ticket) = node.waiting.pop_front() {
            node.admission.on_abandon(ticket, node.now_ms);
        }
        while let Some((_, ticket)) = node.running.pop() {
            node.admission.on_end(ticket, node.now_ms);
        }
        prop_assert!(node.offer(0).is_ok());
        prop_assert!(node.admission.may_start(node.now_ms));
    }
}
