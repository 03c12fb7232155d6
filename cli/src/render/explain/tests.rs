use wharf_api::{Candidate, Fact, Finding, PastOwner, Wait};

use super::*;
use crate::render::sample::{self, HOSTILE, NOW};

fn fact(name: &str, value: &str) -> Fact {
    Fact { name: name.to_owned(), value: value.to_owned() }
}

fn entry(at: u64, operation: &str, phase: &str, took_us: Option<u64>, outcome: LogStatus, text: &str) -> TimelineEntry {
    let (operation, phase, text) = (operation.to_owned(), phase.to_owned(), text.to_owned());
    TimelineEntry { time_unix_ms: at, operation, phase, took_us, outcome, text }
}

fn blank(kind: SubjectKind, health: Health, subject: &str, summary: &str) -> Explanation {
    Explanation {
        subject: subject.to_owned(),
        kind,
        health,
        summary: summary.to_owned(),
        endpoint: None,
        facts: Vec::new(),
        waits: None,
        errors: Vec::new(),
        timeline: Vec::new(),
        left_out: 0,
        verdicts: Vec::new(),
        kernel: None,
        before: Vec::new(),
        candidates: Vec::new(),
        searched: Vec::new(),
    }
}

fn counter(dropped: bool, reason: &str, packets: u64) -> MetricRow {
    let (direction, reason) = ("egress".to_owned(), reason.to_owned());
    MetricRow { endpoint: Some(7), direction, reason, dropped, packets, bytes: packets * 98 }
}

#[test]
fn one_that_is_stuck_in_its_delete() {
    let began = NOW - 200_000;
    let failed =
        entry(NOW - 180_000, "delete", "remove-link", Some(8_000_123), LogStatus::Failure, "no answer within 8s");
    let stuck = Explanation {
        endpoint: Some(sample::endpoint()),
        facts: vec![fact("attachment", "wharf/3f9c51aa01b2:eth0"), fact("addresses", "10.88.0.7, fd00:88::7")],
        waits: Some(Wait {
            waits_for: "its link to go (step remove-link)".to_owned(),
            since_unix_ms: NOW - 188_000,
            ends_when: "a delete whose steps all succeed".to_owned(),
        }),
        errors: vec![failed.clone()],
        timeline: vec![
            entry(began, "create", "lease", Some(12), LogStatus::Ok, ""),
            entry(began + 2, "create", "ensure-link", Some(1_234), LogStatus::Ok, ""),
            entry(NOW - 188_100, "delete", "write-intent", Some(900), LogStatus::Ok, ""),
            failed,
        ],
        left_out: 3,
        verdicts: vec![counter(false, "forwarded-local", 120), counter(true, "invalid-source-ip", 3)],
        kernel: Some(KernelLook {
            could_not_look: None,
            findings: vec![Finding {
                object: "link".to_owned(),
                subject: "wh00070000002a".to_owned(),
                problem: "is there, and should be gone".to_owned(),
                owner: None,
                repairable: true,
                ..Finding::default()
            }],
        }),
        ..blank(
            SubjectKind::Endpoint,
            Health::Degraded,
            "endpoint 7",
            "disconnecting for 3m08s (since 11:56:52 UTC): waits for its link to go (step remove-link)",
        )
    };
    insta::assert_snapshot!(explain(&stuck, &Style::plain()));
}

#[test]
fn one_that_is_gone_and_one_that_nobody_knows() {
    let gone = Explanation {
        kernel: Some(KernelLook { could_not_look: None, findings: Vec::new() }),
        before: vec![PastOwner {
            endpoint: 4,
            epoch: 12,
            attachment: "wharf/3f9c51aa01b2:eth0".to_owned(),
            addresses: Vec::new(),
            created_unix_ms: NOW - 900_000,
            ended_unix_ms: NOW - 600_000,
            end: "deleted".to_owned(),
        }],
        ..blank(SubjectKind::PastEndpoint, Health::Ok, "endpoint 7 of epoch 41", "deleted 4m ago")
    };
    let unknown = Explanation {
        candidates: vec![Candidate { subject: "7".to_owned(), what: "endpoint 7, wharf/3f9c:eth0".to_owned() }],
        searched: vec!["2 endpoints".to_owned()],
        ..blank(SubjectKind::Unknown, Health::Pending, "3f9d", "nothing on this node is or was called \"3f9d\"")
    };
    let both = format!("{}\n{}", explain(&gone, &Style::plain()), explain(&unknown, &Style::plain()));
    insta::assert_snapshot!(both);
}

#[test]
fn hostile_words_stay_on_their_lines() {
    let mut hostile = blank(SubjectKind::Endpoint, Health::Ok, HOSTILE, HOSTILE);
    hostile.facts = vec![fact(HOSTILE, HOSTILE)];
    hostile.timeline = vec![entry(NOW, HOSTILE, HOSTILE, None, LogStatus::Ok, HOSTILE)];
    hostile.errors = hostile.timeline.clone();
    hostile.verdicts = vec![counter(true, HOSTILE, 1)];
    hostile.candidates = vec![Candidate { subject: HOSTILE.to_owned(), what: HOSTILE.to_owned() }];
    hostile.searched = vec![HOSTILE.to_owned()];
    hostile.kernel = Some(KernelLook { could_not_look: Some(HOSTILE.to_owned()), findings: Vec::new() });
    let shown = explain(&hostile, &Style::plain());
    assert!(text::is_safe(&shown) && !shown.lines().any(|l| l.starts_with("fake row")), "{shown}");
}

#[test]
fn lengths() {
    assert_eq!(
        [0, 999, 1_000, 12_345, 999_999, 3_400_000, 130_000_000].map(length_us),
        ["0us", "999us", "1.0ms", "12.3ms", "999.9ms", "3.4s", "2m10s"]
    );
    assert_eq!([0, 9_999, 10_000, 188_000].map(length_ms), ["0ms", "9999ms", "10s", "3m8s"]);
}
