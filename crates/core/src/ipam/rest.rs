//! Released addresses of one family: resting, and rested (free again), ordered by release: the newest is reused last.

use std::collections::{BTreeMap, HashMap};

use crate::store::Rest;

/// Release time: Unix milliseconds, and a number that orders equal times.
pub(super) type Release = (u64, u64);

/// Rested addresses: leased only without fresh ones.
#[derive(Debug, Clone, Default)]
pub(super) struct Rested {
    by_release: BTreeMap<Release, u128>,
    release_of: HashMap<u128, Release>,
}

impl Rested {
    /// Above `most`, returns the oldest.
    pub(super) fn push(&mut self, n: u128, release: Release, most: usize) -> Option<u128> {
        self.by_release.insert(release, n);
        self.release_of.insert(n, release);
        if self.by_release.len() <= most {
            return None;
        }
        let (_, oldest) = self.by_release.pop_first()?;
        self.release_of.remove(&oldest);
        Some(oldest)
    }

    pub(super) fn remove(&mut self, n: u128) -> bool {
        self.release_of.remove(&n).is_some_and(|release| self.by_release.remove(&release).is_some())
    }

    pub(super) fn by_age(&self) -> impl Iterator<Item = u128> {
        self.by_release.values().copied()
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_release.len()
    }

    fn set_clock_back(&mut self, now_ms: u64) {
        self.by_release = earlier(&self.by_release, now_ms);
        self.release_of = self.by_release.iter().map(|(release, n)| (*n, *release)).collect();
    }
}

#[derive(Debug, Clone)]
pub(super) struct Sleeper {
    pub(super) rest: Rest,
    pub(super) release: Release,
    /// Number and result of the last failed check.
    blocked: Option<(u64, String)>,
}

impl Sleeper {
    pub(super) fn why(&self) -> Option<&str> {
        self.blocked.as_ref().map(|(_, why)| why.as_str())
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Resting {
    sleepers: HashMap<u128, Sleeper>,
    /// Without a failed check.
    by_release: BTreeMap<Release, u128>,
    /// With a failed check, oldest first.
    by_check: BTreeMap<u64, u128>,
}

impl Resting {
    pub(super) fn len(&self) -> usize {
        self.sleepers.len()
    }

    pub(super) fn get(&self, n: u128) -> Option<&Sleeper> {
        self.sleepers.get(&n)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Sleeper> {
        self.sleepers.values()
    }

    pub(super) fn push(&mut self, n: u128, rest: Rest, release: Release) {
        self.remove(n);
        self.by_release.insert(release, n);
        self.sleepers.insert(n, Sleeper { rest, release, blocked: None });
    }

    pub(super) fn remove(&mut self, n: u128) -> Option<Sleeper> {
        let sleeper = self.sleepers.remove(&n)?;
        match &sleeper.blocked {
            Some((check, _)) => self.by_check.remove(check),
            None => self.by_release.remove(&sleeper.release),
        };
        Some(sleeper)
    }

    /// The next check comes after all others. `check` is unique and increasing.
    pub(super) fn block(&mut self, n: u128, why: String, check: u64) -> bool {
        let Some(sleeper) = self.sleepers.get_mut(&n) else { return false };
        match &sleeper.blocked {
            Some((earlier, _)) => self.by_check.remove(earlier),
            None => self.by_release.remove(&sleeper.release),
        };
        sleeper.blocked = Some((check, why));
        self.by_check.insert(check, n);
        true
    }

    pub(super) fn unblocked(&self) -> impl Iterator<Item = &Sleeper> {
        self.by_release.values().filter_map(|n| self.sleepers.get(n))
    }

    pub(super) fn blocked(&self) -> impl Iterator<Item = (u64, &Sleeper)> {
        self.by_check.iter().filter_map(|(check, n)| Some((*check, self.sleepers.get(n)?)))
    }

    fn set_clock_back(&mut self, now_ms: u64) {
        self.by_release = earlier(&self.by_release, now_ms);
        for sleeper in self.sleepers.values_mut() {
            sleeper.release.0 = sleeper.release.0.min(now_ms);
        }
    }
}

/// Moves future releases to `now_ms` in order: addresses must not rest until the clock catches up.
pub(super) fn set_clock_back(resting: &mut Resting, rested: &mut Rested, now_ms: u64) {
    resting.set_clock_back(now_ms);
    rested.set_clock_back(now_ms);
}

fn earlier(by_release: &BTreeMap<Release, u128>, now_ms: u64) -> BTreeMap<Release, u128> {
    by_release.iter().map(|((ms, number), n)| (((*ms).min(now_ms), *number), *n)).collect()
}
