//! The verdict on a round of probes.

use std::{collections::BTreeSet, net::IpAddr};

use super::probe::{Outcome, Probed};

/// Failed rounds before a relaunch, because packets may be lost.
pub(super) const PATIENCE: u64 = 3;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Well,
    Wait(String),
    /// A relaunch would not help: another responder has the address.
    Foreign(String),
    Relaunch(String),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Judge {
    pub(super) failed: u64,
    due: u64,
}

impl Judge {
    pub(super) fn round(&mut self, probed: &[Probed], amiss: Option<&[String]>) -> Verdict {
        let failures: Vec<String> = probed.iter().filter_map(Probed::failure).collect();
        if failures.is_empty() {
            *self = Self::default();
            return Verdict::Well;
        }
        self.failed += 1;
        let why = failures.join("; ");
        let foreign = |p: &&Probed| matches!(p.outcome, Outcome::WrongAnswer(_));
        let strangers: BTreeSet<IpAddr> = probed.iter().filter(foreign).map(|p| p.address).collect();
        let silent = probed.iter().any(|p| p.failure().is_some() && !strangers.contains(&p.address));
        // A relaunch would change nothing: kernel objects are intact.
        let is_behind = amiss.is_some_and(<[String]>::is_empty);
        if !strangers.is_empty() && !silent && is_behind {
            self.due = 0;
            return Verdict::Foreign(why);
        }
        self.due += 1;
        if self.due < PATIENCE {
            return Verdict::Wait(why);
        }
        let amiss = amiss.unwrap_or_default();
        let found = if amiss.is_empty() { String::new() } else { format!("; in the kernel: {}", amiss.join("; ")) };
        Verdict::Relaunch(format!("{} rounds in a row failed: {why}{found}", self.due))
    }
}

#[cfg(test)]
mod tests {
    use std::{net::Ipv4Addr, time::Duration};

    use wharf_api::ProbeKind;

    use super::*;

    const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2));
    const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 3));

    fn probed(address: IpAddr, outcome: Outcome) -> Probed {
        Probed { address, kind: ProbeKind::Http, outcome }
    }

    fn answered() -> Outcome {
        Outcome::Answered(Duration::from_micros(80))
    }

    fn silence() -> Outcome {
        Outcome::NoAnswer("no answer within 1s".into())
    }

    fn stranger() -> Outcome {
        Outcome::WrongAnswer("something else answers".into())
    }

    #[test]
    fn never_after_the_first_nor_the_second_but_after_the_third_in_a_row() {
        let mut judge = Judge::default();
        let lost = [probed(A, answered()), probed(B, silence())];
        for _ in 0..2 {
            for _ in 0..2 {
                assert!(matches!(judge.round(&lost, Some(&[])), Verdict::Wait(_)));
            }
            assert_eq!(judge.round(&[probed(A, answered())], Some(&[])), Verdict::Well);
        }
        judge.round(&lost, Some(&[]));
        judge.round(&lost, None);
        let why = "3 rounds in a row failed: HTTP to 10.0.0.3: no answer within 1s; in the kernel: route gone";
        assert_eq!(judge.round(&lost, Some(&["route gone".into()])), Verdict::Relaunch(why.into()));
    }

    #[test]
    fn what_could_not_be_tried_counts_for_nothing() {
        let untried = Outcome::NotTried("no CAP_NET_RAW".into());
        assert_eq!(Judge::default().round(&[probed(A, untried)], None), Verdict::Well);
    }

    #[test]
    fn a_stranger_ends_in_a_launch_only_when_ours_is_not_behind() {
        let mut judge = Judge::default();
        for _ in 0..5 {
            let both = [probed(A, stranger()), probed(B, answered())];
            assert!(matches!(judge.round(&both, Some(&[])), Verdict::Foreign(_)));
        }
        assert!(matches!(judge.round(&[probed(A, silence())], Some(&[])), Verdict::Wait(_)), "the first silence");
        let mut judge = Judge::default();
        for _ in 0..2 {
            assert!(matches!(judge.round(&[probed(A, stranger())], None), Verdict::Wait(_)), "ours may be behind");
        }
        let gone = ["route 10.0.0.2/32: expected on the node, is not there".to_owned()];
        assert!(matches!(judge.round(&[probed(A, stranger())], Some(&gone)), Verdict::Relaunch(_)));
    }

    #[test]
    fn a_stranger_at_one_address_does_not_excuse_silence_at_the_other() {
        let mut judge = Judge::default();
        let both = [probed(A, stranger()), probed(B, silence())];
        judge.round(&both, Some(&[]));
        judge.round(&both, Some(&[]));
        assert!(matches!(judge.round(&both, Some(&[])), Verdict::Relaunch(_)));
    }
}
