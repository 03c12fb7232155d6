//! Limits log lines, which any peer can cause, per second and place in the code: [`PER_SUBJECT`] about a subject,
//! [`PER_PLACE`] in total. Further lines are counted and summarised.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// Per second, place and subject.
pub const PER_SUBJECT: u32 = 10;
/// Per second, place.
pub const PER_PLACE: u32 = 50;
const MAX_SUBJECTS: usize = 1024;
/// Counting window.
pub const WINDOW: Duration = Duration::from_secs(1);

/// Static description's address.
pub type Place = usize;

/// One place's suppressed lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suppressed<S> {
    /// Their number.
    pub count: u64,
    /// The last one.
    pub sample: S,
}

#[derive(Debug)]
struct Window<S> {
    began: Instant,
    told: u32,
    suppressed: Option<Suppressed<S>>,
}

/// `S`: the sample of suppressed lines.
#[derive(Debug)]
pub struct Limiter<S> {
    places: HashMap<Place, Window<S>>,
    subjects: HashMap<(Place, u64), (Instant, u32)>,
}

impl<S> Default for Limiter<S> {
    fn default() -> Self {
        Self { places: HashMap::new(), subjects: HashMap::new() }
    }
}

impl<S> Limiter<S> {
    /// The line may be written; and an ended window's suppressed lines.
    pub fn admit(
        &mut self,
        place: Place,
        subject: Option<u64>,
        now: Instant,
        sample: impl FnOnce() -> S,
    ) -> (bool, Option<Suppressed<S>>) {
        let window = self.places.entry(place).or_insert_with(|| Window { began: now, told: 0, suppressed: None });
        let mut ended = None;
        if now.saturating_duration_since(window.began) >= WINDOW {
            ended = window.suppressed.take();
            (window.began, window.told) = (now, 0);
        }
        let mut pass = window.told < PER_PLACE;
        if let Some(subject) = subject {
            let known = self.subjects.contains_key(&(place, subject));
            if known || self.subjects.len() < MAX_SUBJECTS {
                let (began, told) = self.subjects.entry((place, subject)).or_insert((now, 0));
                if now.saturating_duration_since(*began) >= WINDOW {
                    (*began, *told) = (now, 0);
                }
                pass &= *told < PER_SUBJECT;
                if pass {
                    *told += 1;
                }
            }
        }
        if pass {
            window.told += 1;
        } else {
            let count = window.suppressed.take().map_or(0, |s| s.count) + 1;
            window.suppressed = Some(Suppressed { count, sample: sample() });
        }
        (pass, ended)
    }

    /// Ended windows' suppressed lines; drops quiet places and subjects.
    pub fn sweep(&mut self, now: Instant) -> Vec<Suppressed<S>> {
        let over = |began: Instant| now.saturating_duration_since(began) >= WINDOW;
        let mut ended = Vec::new();
        self.places.retain(|_, window| {
            if !over(window.began) {
                return true;
            }
            ended.extend(window.suppressed.take());
            false
        });
        self.subjects.retain(|_, (began, _)| !over(*began));
        ended
    }

    /// Subjects counted now.
    #[must_use]
    pub fn subjects(&self) -> usize {
        self.subjects.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flood(limiter: &mut Limiter<u64>, subject: impl Fn(u64) -> Option<u64>, lines: u64, now: Instant) -> u64 {
        (0..lines).map(|n| u64::from(limiter.admit(1, subject(n), now, || n).0)).sum()
    }

    #[test]
    fn one_subject_has_its_share_and_leaves_the_others_theirs() {
        let (mut limiter, now) = (Limiter::default(), Instant::now());
        assert_eq!(flood(&mut limiter, |_| Some(7), 1_000, now), u64::from(PER_SUBJECT));
        assert!(limiter.admit(1, Some(8), now, || 0).0, "another subject");
        assert!(limiter.admit(2, Some(7), now, || 0).0, "another place");
    }

    #[test]
    fn a_subject_for_each_line_does_not_help_and_costs_bounded_memory() {
        let (mut limiter, now) = (Limiter::default(), Instant::now());
        assert_eq!(flood(&mut limiter, Some, 100_000, now), u64::from(PER_PLACE));
        assert_eq!(limiter.subjects(), MAX_SUBJECTS);
    }

    #[test]
    fn what_was_held_back_is_told_once_when_the_second_is_over() {
        let (mut limiter, now) = (Limiter::default(), Instant::now());
        flood(&mut limiter, |_| None, 87, now);
        assert_eq!(limiter.sweep(now), [], "not yet");
        let later = now + WINDOW;
        let (pass, ended) = limiter.admit(1, None, later, || 0);
        assert!(pass);
        assert_eq!(ended, Some(Suppressed { count: 37, sample: 86 }));
        assert_eq!(limiter.sweep(later + WINDOW), []);
        flood(&mut limiter, |_| None, 51, later + WINDOW);
        assert_eq!(limiter.sweep(later + 2 * WINDOW), [Suppressed { count: 1, sample: 50 }]);
        assert_eq!((limiter.places.len(), limiter.subjects()), (0, 0), "what is quiet is forgotten");
    }
}
