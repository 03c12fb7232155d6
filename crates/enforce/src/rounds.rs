//! Rounds: how often a member restarted connections because rows led some elsewhere although its listener stayed.
//!
//! A round is saved before the rows change, for the next agent. The proxy gets it after open handshakes.

use std::{collections::BTreeMap, time::Instant};

use wharf_core::ids::{EndpointId, Epoch};

use crate::redirects::RedirectTable;

/// Listener's port, and member.
pub(crate) type Place = (u16, (EndpointId, Epoch));

/// Pending rounds of a member. Further ones join the last, because constant changes must not delay it forever.
const WAITING: usize = 2;

/// Members without a number are in round zero.
#[derive(Debug, Default)]
pub(crate) struct Rounds {
    numbers: BTreeMap<Place, u32>,
    /// Start times, earliest first.
    waiting: BTreeMap<Place, Vec<Instant>>,
}

impl Rounds {
    pub(crate) fn new(numbers: BTreeMap<Place, u32>) -> Self {
        Self { numbers, waiting: BTreeMap::new() }
    }

    pub(crate) fn numbers(&self) -> &BTreeMap<Place, u32> {
        &self.numbers
    }

    pub(crate) fn begin(&mut self, place: Place, at: Instant) {
        let waiting = self.waiting.entry(place).or_default();
        if waiting.len() == WAITING {
            waiting.pop();
        } else {
            *self.numbers.entry(place).or_default() += 1;
        }
        waiting.push(at);
    }

    pub(crate) fn put_off(&mut self, place: Place, at: Instant) {
        if let Some(last) = self.waiting.get_mut(&place).and_then(|waiting| waiting.last_mut()) {
            *last = at;
        }
    }

    /// Begins due rounds, and drops members that `wanted` lacks.
    pub(crate) fn pass(&mut self, wanted: &RedirectTable, now: Instant) {
        let is_there = |(port, member): &Place| wanted.get(port).is_some_and(|of| of.members.contains_key(member));
        self.waiting.retain(|place, times| {
            times.retain(|at| *at > now);
            !times.is_empty() && is_there(place)
        });
        self.numbers.retain(|place, _| is_there(place));
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.waiting.values().flatten().min().copied()
    }

    pub(crate) fn is_any(&self) -> bool {
        !self.numbers.is_empty()
    }

    pub(crate) fn tell(&self, wanted: &mut RedirectTable) {
        for (port, redirect) in wanted {
            let of = |member: &(EndpointId, Epoch)| {
                let place = (*port, *member);
                let waiting = self.waiting.get(&place).map_or(0, Vec::len);
                let now = self.numbers.get(&place)?.saturating_sub(u32::try_from(waiting).unwrap_or(u32::MAX));
                (now > 0).then_some((*member, now))
            };
            redirect.rounds = redirect.members.keys().filter_map(of).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use wharf_policy::{
        compile::{Listener, Share},
        model::Direction,
        requests::Requests,
    };

    use super::*;
    use crate::redirects::Redirect;

    const SOON: Duration = Duration::from_millis(500);

    #[test]
    fn a_round_begins_when_its_time_has_come_and_the_next_does_not_put_it_off() {
        let member = (EndpointId::try_from(7).expect("an id"), Epoch(1));
        let requests = Arc::new(Requests::default());
        let listener = Arc::new(Listener { direction: Direction::Ingress, requests, share: Share::default() });
        let members = [(member, Vec::new())].into();
        let mut wanted: RedirectTable = [(15_000, Redirect { listener, members, rounds: BTreeMap::new() })].into();
        let (place, began) = ((15_000, member), Instant::now());
        let mut rounds = Rounds::default();
        let mut told = |rounds: &mut Rounds, now| {
            rounds.pass(&wanted, now);
            rounds.tell(&mut wanted);
            wanted[&15_000].rounds.get(&member).copied().unwrap_or(0)
        };
        rounds.begin(place, began + SOON);
        assert_eq!(told(&mut rounds, began), 0, "handshakes go on");
        for nth in 1..20 {
            rounds.begin(place, began + SOON + nth * SOON / 10);
        }
        assert_eq!((rounds.numbers()[&place], rounds.next()), (2, Some(began + SOON)), "they join");
        assert_eq!(told(&mut rounds, began + SOON), 1);
        rounds.put_off(place, began + 10 * SOON);
        assert_eq!(told(&mut rounds, began + 9 * SOON), 1);
        assert_eq!((told(&mut rounds, began + 10 * SOON), rounds.next()), (2, None));
        rounds.pass(&RedirectTable::new(), began);
        assert!(!rounds.is_any(), "the member is gone");
    }
}
