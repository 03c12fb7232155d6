//! Round-trip times and losses of the last probes, by kind and address.

use std::{collections::VecDeque, net::IpAddr, num::NonZeroU32, time::Duration};

use wharf_api::{IpFamily, ProbeStatus};

use super::probe::{Outcome, Probed};

const SIZE: usize = 60;

#[derive(Debug, Default)]
pub(super) struct Windows(Vec<Window>);

#[derive(Debug)]
struct Window {
    last: Probed,
    /// Microseconds, rounded up to 1; `None`: lost. Four bytes, because each node has windows.
    trips: VecDeque<Option<NonZeroU32>>,
}

impl Windows {
    pub(super) fn add(&mut self, round: Vec<Probed>) {
        for probed in round {
            let same = |w: &&mut Window| (w.last.address, w.last.kind) == (probed.address, probed.kind);
            let trip = match &probed.outcome {
                Outcome::Answered(trip) => Some(Some(micros(*trip))),
                Outcome::NoAnswer(_) | Outcome::WrongAnswer(_) => Some(None),
                Outcome::NotTried(_) => None,
            };
            let window = match self.0.iter_mut().find(same) {
                Some(window) => {
                    window.last = probed;
                    window
                }
                None => {
                    self.0.push(Window { last: probed, trips: VecDeque::new() });
                    let Some(window) = self.0.last_mut() else { continue };
                    window
                }
            };
            if let Some(trip) = trip {
                if window.trips.len() == SIZE {
                    window.trips.pop_front();
                }
                window.trips.push_back(trip);
            }
        }
    }

    pub(super) fn keep(&mut self, addresses: &[IpAddr]) {
        self.0.retain(|window| addresses.contains(&window.last.address));
    }

    pub(super) fn status(&self) -> Vec<ProbeStatus> {
        self.0.iter().map(Window::status).collect()
    }
}

impl Window {
    fn status(&self) -> ProbeStatus {
        let (outcome, error) = self.last.outcome.words();
        let trips: Vec<u64> = self.trips.iter().flatten().map(|us| u64::from(us.get())).collect();
        let (sent, answered) = (self.trips.len() as u64, trips.len() as u64);
        ProbeStatus {
            family: if self.last.address.is_ipv6() { IpFamily::Ipv6 } else { IpFamily::Ipv4 },
            address: self.last.address,
            probe: self.last.kind,
            outcome,
            error,
            last_us: trips.last().copied(),
            min_us: trips.iter().min().copied(),
            mean_us: trips.iter().sum::<u64>().checked_div(answered),
            max_us: trips.iter().max().copied(),
            sent,
            lost: sent - answered,
        }
    }
}

fn micros(trip: Duration) -> NonZeroU32 {
    NonZeroU32::new(u32::try_from(trip.as_micros()).unwrap_or(u32::MAX)).unwrap_or(NonZeroU32::MIN)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use wharf_api::{ProbeKind, ProbeOutcome};

    use super::*;

    fn add(windows: &mut Windows, outcome: Outcome) -> ProbeStatus {
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        windows.add(vec![Probed { address, kind: ProbeKind::Icmp, outcome }]);
        windows.status().remove(0)
    }

    #[test]
    fn times_and_losses_of_the_last_ones() {
        let mut windows = Windows::default();
        let first = add(&mut windows, Outcome::NotTried("no".into()));
        assert_eq!((first.sent, first.lost, first.mean_us), (0, 0, None));
        add(&mut windows, Outcome::NoAnswer("no".into()));
        add(&mut windows, Outcome::Answered(Duration::from_micros(100)));
        let s = add(&mut windows, Outcome::Answered(Duration::from_micros(300)));
        assert_eq!((s.sent, s.lost, s.outcome), (3, 1, ProbeOutcome::Answered));
        assert_eq!((s.last_us, s.min_us, s.mean_us, s.max_us), (Some(300), Some(100), Some(200), Some(300)));
        for _ in 0..SIZE {
            add(&mut windows, Outcome::Answered(Duration::from_micros(5)));
        }
        let s = add(&mut windows, Outcome::WrongAnswer("x".into()));
        assert_eq!((s.sent, s.lost, s.max_us), (SIZE as u64, 1, Some(5)));
        assert_eq!((s.outcome, s.error.as_str()), (ProbeOutcome::WrongAnswer, "x"));
        windows.keep(&[IpAddr::V4(Ipv4Addr::LOCALHOST)]);
        assert_eq!(windows.status().len(), 1);
        windows.keep(&[]);
        assert_eq!(windows.status(), []);
    }
}
