//! The summary sentence of an explanation.

use wharf_api::{EndpointState, Health};
use wharf_core::{
    finding::{Problem, Verdict, verdict},
    ids::EndpointId,
};

use super::Unknown;
use crate::findings::{endpoint_health, in_words};

#[derive(Debug, Clone)]
pub(super) struct Known<'a> {
    pub(super) state: EndpointState,
    pub(super) since_unix_ms: u64,
    pub(super) phase: &'a str,
    pub(super) waits: (&'a str, &'a str),
    pub(super) last_error: Option<&'a str>,
    pub(super) kernel: Result<&'a [Problem], &'a Unknown>,
    /// Drops for a foreign source address or MAC, by reason.
    pub(super) in_anothers_name: &'a [(String, u64)],
    pub(super) to_be_deleted: bool,
    pub(super) now_ms: u64,
}

#[must_use]
pub(super) fn conclude(k: &Known<'_>) -> (Health, String) {
    let since = since(k.now_ms, k.since_unix_ms);
    let error = |lead: &str| k.last_error.map(|e| format!("{lead}{e}")).unwrap_or_default();
    let (health, mut sentence) = match k.state {
        EndpointState::Ready => match (found(k), k.last_error) {
            (Ok(None), None) if k.in_anothers_name.is_empty() => {
                (Health::Ok, format!("ready {since}; nothing is wrong"))
            }
            (Ok(None), None) => {
                let reasons: Vec<String> = k.in_anothers_name.iter().map(|(why, n)| format!("{why} {n}")).collect();
                let text = "nothing is wrong with it, but packets with a spoofed source address were dropped";
                (Health::Ok, format!("ready {since}; {text}: {}", reasons.join(", ")))
            }
            (Ok(None), Some(e)) => (Health::Degraded, format!("ready {since}, but its last build failed: {e}")),
            (Ok(Some((health, things))), _) => (health, format!("ready {since}, but {things}")),
            (Err(why), _) => {
                (Health::Degraded, format!("ready {since}; whether the kernel has what it should is not known: {why}"))
            }
        },
        EndpointState::Disconnecting => {
            let last = error("; last error: ");
            (Health::Degraded, format!("disconnecting {since}: waits for {}{last}; {}", what(k), ends(k)))
        }
        EndpointState::WaitingToRegenerate if k.last_error.is_some() => {
            let last = error("");
            let text = format!(
                "its last build failed {since}: {last}; the state before stays in force, and it is built again"
            );
            let (health, things) = match found(k) {
                Ok(Some((health, things))) => (health, format!("; {things}")),
                Ok(None) | Err(_) => (Health::Degraded, String::new()),
            };
            (health, format!("{text}{things}; {}", ends(k)))
        }
        EndpointState::Disconnected => (Health::Pending, format!("gone {since}")),
        EndpointState::Invalid => (Health::Failing, format!("its create failed {since}{}", error(": "))),
        state => (Health::Pending, format!("{} {since}: waits for {}; {}", word(state), what(k), ends(k))),
    };
    if k.to_be_deleted && k.state != EndpointState::Disconnecting {
        sentence.push_str("; a runtime wanted it deleted while no agent ran, and its deletion record still waits");
        return (health.max(Health::Degraded), sentence);
    }
    (health, sentence)
}

fn found<'a>(k: &Known<'a>) -> Result<Option<(Health, String)>, &'a Unknown> {
    let problems = k.kernel?;
    let Some(worst) = worst(problems) else { return Ok(None) };
    let count = problems.iter().filter(|p| p.verdict() > Verdict::Well).count();
    let things = match (worst.verdict(), count) {
        (Verdict::Well, _) => return Ok(None),
        (Verdict::ContainersOwn, 1) => "its container changed its own network".to_owned(),
        (Verdict::ContainersOwn, n) => format!("its container changed {n} things of its own network"),
        (Verdict::Amiss, 1) => "one thing is not as it should be in the kernel".to_owned(),
        (Verdict::Amiss, n) => format!("{n} things are not as they should be in the kernel"),
    };
    Ok(Some((endpoint_health(worst.verdict()), format!("{things}: {}", in_words(worst)))))
}

fn worst(problems: &[Problem]) -> Option<&Problem> {
    let verdict = verdict(problems);
    problems.iter().find(|p| p.verdict() == verdict && verdict > Verdict::Well)
}

#[must_use]
pub(super) fn what_to_do(k: &Known<'_>, id: EndpointId) -> Option<String> {
    let found = k.kernel.ok().and_then(worst);
    match k.state {
        EndpointState::Ready | EndpointState::WaitingToRegenerate if found.is_some() => found.map(Problem::remedy),
        EndpointState::Disconnecting if k.last_error.is_some() => Some(format!(
            "mend what the last error names; the delete is tried again by itself every 30 s, or now: `wharf endpoint delete \
             {id}`"
        )),
        EndpointState::WaitingToRegenerate if k.last_error.is_some() => Some(format!(
            "mend what the error names; it is built again by itself, or now: `wharf endpoint regenerate {id} --level datapath`"
        )),
        EndpointState::Ready if k.kernel.is_ok() && !k.in_anothers_name.is_empty() => Some(format!(
            "see what it sends: `wharf monitor --type drop --endpoint {id}`; it may use its own addresses and its own MAC \
             only"
        )),
        _ => None,
    }
}

fn what(k: &Known<'_>) -> String {
    match (step_in_words(k.phase), k.waits.0) {
        (Some(words), _) => format!("{words} (step {})", k.phase),
        (None, "") if k.phase.is_empty() => "its turn".to_owned(),
        (None, "") => format!("step {}", k.phase),
        (None, waits) => waits.to_owned(),
    }
}

fn ends(k: &Known<'_>) -> String {
    match k.waits.1 {
        "" => "what ends the wait: that it is done, or its deadline".to_owned(),
        when => format!("what ends the wait: {when}"),
    }
}

#[must_use]
pub(super) fn step_in_words(step: &str) -> Option<&'static str> {
    Some(match step {
        "write-intent" | "commit" | "remove-record" => "the store to write",
        "lease" => "an address",
        "ensure-programs" => "its programs to be loaded and verified",
        "ensure-link" => "its link to be made",
        "ensure-config" => "its configuration row to be written",
        "ensure-attached" => "its programs to be attached",
        "ensure-connected" => "its link to come up",
        "ensure-reachable" => "its rows in the shared maps and its published ports to be written",
        "detach" => "its programs to come off",
        "remove-reachable" => "its rows in the shared maps to go",
        "await-proxy" => "the proxy to let go of its connections",
        "unpin" => "its pins to go",
        "remove-link" => "its link to go",
        "await-kernel" => "the kernel to release its link",
        _ => return None,
    })
}

fn word(state: EndpointState) -> &'static str {
    match state {
        EndpointState::WaitingForIdentity => "waiting for an identity",
        EndpointState::WaitingToRegenerate => "waiting to be built",
        EndpointState::Regenerating => "being built",
        EndpointState::Ready => "ready",
        EndpointState::Restoring => "being restored after a restart",
        EndpointState::Disconnecting => "disconnecting",
        EndpointState::Disconnected => "gone",
        EndpointState::Invalid => "invalid",
    }
}

/// `for 3m12s (since 12:01:02 UTC)`.
#[must_use]
pub(super) fn since(now_ms: u64, then_ms: u64) -> String {
    if then_ms == 0 {
        return "for a time that is not known".to_owned();
    }
    let s = then_ms / 1_000 % 86_400;
    let clock = format!("{:02}:{:02}:{:02} UTC", s / 3_600, s / 60 % 60, s % 60);
    format!("for {} (since {clock})", span(now_ms.saturating_sub(then_ms)))
}

#[must_use]
pub(super) fn span(ms: u64) -> String {
    let s = ms / 1_000;
    match s {
        0..60 => format!("{s}s"),
        60..3_600 => format!("{}m{:02}s", s / 60, s % 60),
        3_600..86_400 => format!("{}h{:02}m", s / 3_600, s / 60 % 60),
        _ => format!("{}d{}h", s / 86_400, s / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use wharf_core::finding::{EndpointProblem, Side};

    use super::*;

    const NOW: u64 = 1_790_856_192_000;

    fn row() -> Problem {
        let address = [10, 0, 0, 7].into();
        Problem::Endpoint(EndpointId::try_from(7).unwrap(), EndpointProblem::Row { address, found: None })
    }

    fn ready() -> Known<'static> {
        Known {
            state: EndpointState::Ready,
            since_unix_ms: NOW - 192_000,
            phase: "",
            waits: ("", ""),
            last_error: None,
            kernel: Ok(&[]),
            in_anothers_name: &[],
            to_be_deleted: false,
            now_ms: NOW,
        }
    }

    fn said(known: &Known<'_>) -> String {
        let (health, sentence) = conclude(known);
        format!("{health:?}: {sentence}")
    }

    #[test]
    fn the_sentence_says_what_is_wrong_and_what_ends_it() {
        assert_eq!(said(&ready()), "Ok: ready for 3m12s (since 12:00:00 UTC); nothing is wrong");
        assert_eq!(
            said(&Known { kernel: Ok(&[row()]), ..ready() }),
            "Failing: ready for 3m12s (since 12:00:00 UTC), but one thing is not as it should be in the kernel: \
             endpoint-row 10.0.0.7: expected, is not there: other endpoints cannot reach this one at this address"
        );
        assert_eq!(
            said(&Known { kernel: Err(&Unknown::KernelSilent), ..ready() }),
            "Degraded: ready for 3m12s (since 12:00:00 UTC); whether the kernel has what it should is not known: the \
             kernel did not answer within 2s"
        );
        assert_eq!(
            said(&Known {
                state: EndpointState::Disconnecting,
                phase: "remove-link",
                waits: ("the steps of its delete", "the last step is done or its deadline passes"),
                ..ready()
            }),
            "Degraded: disconnecting for 3m12s (since 12:00:00 UTC): waits for its link to go (step remove-link); what \
             ends the wait: the last step is done or its deadline passes"
        );
        assert_eq!(
            said(&Known {
                state: EndpointState::Disconnecting,
                waits: ("another delete", "a delete whose steps all succeed"),
                last_error: Some("remove link wh1: busy"),
                ..ready()
            }),
            "Degraded: disconnecting for 3m12s (since 12:00:00 UTC): waits for another delete; last error: remove link \
             wh1: busy; what ends the wait: a delete whose steps all succeed"
        );
        let waiting = said(&Known { to_be_deleted: true, ..ready() });
        assert!(waiting.starts_with("Degraded: ready") && waiting.contains("deletion record"), "{waiting}");
    }

    #[test]
    fn what_to_do_is_said_where_something_can_be_done() {
        let id = EndpointId::try_from(7).unwrap();
        let told = |known: &Known<'_>| what_to_do(known, id).unwrap_or_default();
        assert_eq!(told(&ready()), "");
        assert_eq!(told(&Known { kernel: Ok(&[row()]), ..ready() }), row().remedy());
        let own = Problem::Endpoint(id, EndpointProblem::LinkDown { side: Side::Container, name: "eth0".to_owned() });
        let both = [own.clone(), row()];
        assert_eq!(told(&Known { kernel: Ok(&both), ..ready() }), row().remedy());
        let waiting = Known {
            state: EndpointState::WaitingToRegenerate,
            last_error: Some("ensure-connected: no"),
            kernel: Ok(std::slice::from_ref(&own)),
            ..ready()
        };
        assert_eq!(told(&waiting), own.remedy());
        assert!(said(&waiting).starts_with("Failing: its last build failed"), "{}", said(&waiting));
        assert!(said(&waiting).contains("its container changed its own network: link eth0"), "{}", said(&waiting));
        let stuck = Known { state: EndpointState::Disconnecting, last_error: Some("busy"), ..ready() };
        assert!(told(&stuck).ends_with("`wharf endpoint delete 7`"), "{}", told(&stuck));
        let liar = Known { in_anothers_name: &[("invalid-source-ip".to_owned(), 3)], ..ready() };
        assert!(told(&liar).contains("`wharf monitor --type drop --endpoint 7`"), "{}", told(&liar));
        assert!(said(&liar).ends_with("spoofed source address were dropped: invalid-source-ip 3"), "{}", said(&liar));
    }

    #[test]
    fn every_step_has_words() {
        use wharf_core::plan::{CreateStep, DeleteStep};
        for step in CreateStep::ALL {
            assert!(step_in_words(step.name()).is_some(), "{step}");
        }
        for step in [DeleteStep::Detach, DeleteStep::AwaitProxy, DeleteStep::Unpin, DeleteStep::RemoveLink] {
            assert!(step_in_words(step.name()).is_some(), "{step}");
        }
    }
}
