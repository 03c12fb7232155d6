//! `wharf policy explain`.

use wharf_api::{PolicyExplanation, PolicyJudgement, PolicyRedirect, PolicyVerdict, UNKNOWN_PORT_CLASS};

use super::super::{
    Style, Tone,
    screen::{Screen, wrap},
    text::safe,
};

/// Sender's or receiver's side.
#[derive(Debug, Clone, Copy)]
struct End {
    name: &'static str,
    direction: &'static str,
}

const SENDER: End = End { name: "sender", direction: "egress" };
const RECEIVER: End = End { name: "receiver", direction: "ingress" };

/// Conclusion, then the verdict of each end.
pub(crate) fn explanation(answer: &PolicyExplanation, style: &Style) -> String {
    let ends = [(SENDER, answer.egress.as_ref()), (RECEIVER, answer.ingress.as_ref())];
    let problem = |judgement: &PolicyJudgement| judgement.redirect.as_ref().is_some_and(|way| way.problem.is_some());
    let (tone, sentence) = match answer.verdict {
        PolicyVerdict::Accept => {
            let well = !ends.iter().any(|(_, judgement)| judgement.is_some_and(problem));
            (if well { Tone::Good } else { Tone::Warn }, format!("accepted: {}", accepted(&ends)))
        }
        PolicyVerdict::Deny => (Tone::Bad, format!("denied: {}", denied(&ends))),
    };
    let mut screen = Screen::new(style);
    for line in wrap(&safe(&sentence), style.width.into()) {
        screen.block(&(style.paint(tone, &line) + "\n"));
    }
    if let Some(note) = &answer.note {
        screen.block(&wrap(&safe(&format!("note: {note}")), style.width.into()).join("\n"));
        screen.gap();
    }
    for (end, judgement) in ends {
        screen.gap();
        match judgement {
            Some(judgement) => judged(&mut screen, end, judgement),
            None => screen.heading(&format!("At the {} ({}): no endpoint of this node", end.name, end.direction)),
        }
    }
    screen.finish()
}

type Ends<'a> = [(End, Option<&'a PolicyJudgement>)];

fn accepted(ends: &Ends<'_>) -> String {
    let reasons = ends.iter().filter_map(|(end, judgement)| {
        let (judgement, End { name, direction }) = ((*judgement)?, end);
        Some(match &judgement.rule {
            _ if !judgement.enforced => format!("no policy is enforced at the {name} ({direction})"),
            Some(rule) => {
                let way = judgement.redirect.as_ref().map_or_else(String::new, by_proxy);
                format!("{} allows it at the {name} ({direction}){way}", rule.document)
            }
            None => format!("no rule is about it at the {name} ({direction})"),
        })
    });
    let reasons: Vec<String> = reasons.collect();
    if reasons.is_empty() { "neither end is an endpoint of this node".to_owned() } else { reasons.join("; ") }
}

fn by_proxy(way: &PolicyRedirect) -> String {
    let judges = format!("; the proxy judges what it carries, and lets pass: {}", way.passes.join(" | "));
    match (&way.problem, way.fails_open) {
        // Without `failOpen`, only audit mode passes an unserved flow.
        (None, _) | (Some(_), false) => judges,
        (Some(why), true) => format!("{judges}; but {why}: until then it passes unseen (failOpen)"),
    }
}

/// The sender's reason, if both ends drop the packet.
fn denied(ends: &Ends<'_>) -> String {
    let denies = |judgement: &&PolicyJudgement| judgement.verdict == PolicyVerdict::Deny;
    let first = ends.iter().find_map(|(end, judgement)| Some((end, judgement.filter(denies)?)));
    let Some((End { name, direction }, judgement)) = first else { return unserved(ends) };
    match (&judgement.rule, judgement.isolated_by.as_slice()) {
        (None, []) if judgement.port_class == UNKNOWN_PORT_CLASS => {
            format!("a rule about ports could decide at the {name} ({direction}), and the packet shows none")
        }
        (Some(rule), _) => format!("{} drops it at the {name} ({direction})", rule.document),
        (None, []) => format!("no rule allows it at the {name} ({direction})"),
        (None, [policy]) => format!("{policy} isolates the {name} ({direction}) and no rule allows it"),
        (None, policies) => {
            format!("{} isolate the {name} ({direction}) and no rule allows it", policies.join(", "))
        }
    }
}

/// Both ends accept, but the proxy does not serve.
fn unserved(ends: &Ends<'_>) -> String {
    let mut ways = ends.iter().filter_map(|(end, judgement)| Some((end, (*judgement)?.redirect.as_ref()?)));
    match ways.find(|(_, way)| way.problem.is_some() && !way.fails_open) {
        Some((End { name, direction }, PolicyRedirect { port, problem, .. })) => format!(
            "a rule hands it to the proxy (port {port}) at the {name} ({direction}), and {}",
            problem.as_deref().unwrap_or_default()
        ),
        None => "the agent does not say by which end".to_owned(),
    }
}

fn judged(screen: &mut Screen<'_>, end: End, judgement: &PolicyJudgement) {
    screen.heading(&format!("At the {} ({}): endpoint {}", end.name, end.direction, judgement.endpoint));
    let tone = if judgement.verdict == PolicyVerdict::Accept { Tone::Good } else { Tone::Bad };
    let unenforced = if judgement.enforced { "" } else { "policy is not enforced here" };
    screen.toned("  Verdict", tone, judgement.verdict.as_str(), unenforced);
    match &judgement.rule {
        Some(rule) => {
            screen.line("  Rule", &format!("{}, {}", rule.document, rule.field));
            screen.line("  Written in", &format!("{}:{}", rule.file, rule.line));
        }
        None => screen.line("  Rule", "none"),
    }
    if let Some(way) = &judgement.redirect {
        let without = if way.fails_open { "passes unseen" } else { "is dropped" };
        screen.line("  Proxy", &format!("port {}; without one it {without}", way.port));
        for (i, entry) in way.passes.iter().enumerate() {
            screen.line(if i == 0 { "  Passes" } else { "" }, entry);
        }
        if let Some(why) = &way.problem {
            screen.toned("  Problem", Tone::Warn, why, "");
        }
    }
    if !judgement.isolated_by.is_empty() {
        screen.line("  Isolated by", &judgement.isolated_by.join(", "));
    }
    let PolicyJudgement { rule_set, peer_class, port_class, .. } = judgement;
    let set = if *rule_set == 0 { "none".to_owned() } else { rule_set.to_string() };
    let port = if *port_class == UNKNOWN_PORT_CLASS { "unknown".to_owned() } else { port_class.to_string() };
    screen.line("  Looked up", &format!("rule set {set}, peer class {peer_class}, port class {port}"));
}

#[cfg(test)]
mod tests {
    use wharf_api::PolicyRule;

    use super::*;
    use crate::render::sample::HOSTILE;

    fn judgement(endpoint: u16, verdict: PolicyVerdict) -> PolicyJudgement {
        PolicyJudgement {
            endpoint,
            enforced: true,
            verdict,
            rule: None,
            redirect: None,
            isolated_by: Vec::new(),
            rule_set: 3,
            peer_class: 5,
            port_class: 0,
        }
    }

    fn rule() -> Option<PolicyRule> {
        Some(PolicyRule {
            file: "policies/db.yaml".to_owned(),
            line: 9,
            document: "NetworkPolicy shop/db".to_owned(),
            field: "spec.ingress[0]".to_owned(),
        })
    }

    fn answer(egress: Option<PolicyJudgement>, ingress: Option<PolicyJudgement>) -> PolicyExplanation {
        let is_unserved = |way: &PolicyRedirect| way.problem.is_some() && !way.fails_open;
        let drops = |judgement: &PolicyJudgement| {
            judgement.verdict == PolicyVerdict::Deny || judgement.redirect.as_ref().is_some_and(is_unserved)
        };
        let denies = egress.iter().chain(&ingress).any(drops);
        let verdict = if denies { PolicyVerdict::Deny } else { PolicyVerdict::Accept };
        PolicyExplanation { verdict, egress, ingress, note: None }
    }

    fn isolated(endpoint: u16, by: &[&str]) -> PolicyJudgement {
        let isolated_by = by.iter().map(|policy| (*policy).to_owned()).collect();
        PolicyJudgement { isolated_by, ..judgement(endpoint, PolicyVerdict::Deny) }
    }

    fn sentence(egress: Option<PolicyJudgement>, ingress: Option<PolicyJudgement>) -> String {
        let style = Style { width: 500, ..Style::plain() };
        explanation(&answer(egress, ingress), &style).lines().next().unwrap().to_owned()
    }

    #[test]
    fn the_first_line_says_who_decides() {
        let (accept, deny) = (PolicyVerdict::Accept, PolicyVerdict::Deny);
        let with_rule = |endpoint, verdict| PolicyJudgement { rule: rule(), ..judgement(endpoint, verdict) };
        let unenforced = PolicyJudgement { enforced: false, rule_set: 0, ..judgement(7, accept) };
        for (egress, ingress, wanted) in [
            (None, None, "accepted: neither end is an endpoint of this node"),
            (
                Some(unenforced.clone()),
                Some(with_rule(9, accept)),
                "accepted: no policy is enforced at the sender (egress); NetworkPolicy shop/db allows it at the receiver \
                 (ingress)",
            ),
            (Some(judgement(7, accept)), None, "accepted: no rule is about it at the sender (egress)"),
            (
                Some(unenforced),
                Some(isolated(9, &["NetworkPolicy shop/db"])),
                "denied: NetworkPolicy shop/db isolates the receiver (ingress) and no rule allows it",
            ),
            (
                Some(isolated(7, &["NetworkPolicy a/b", "NetworkPolicy a/c"])),
                Some(isolated(9, &["NetworkPolicy shop/db"])),
                "denied: NetworkPolicy a/b, NetworkPolicy a/c isolate the sender (egress) and no rule allows it",
            ),
            (Some(with_rule(7, deny)), None, "denied: NetworkPolicy shop/db drops it at the sender (egress)"),
            (None, Some(isolated(9, &[])), "denied: no rule allows it at the receiver (ingress)"),
            (
                None,
                Some(PolicyJudgement { port_class: UNKNOWN_PORT_CLASS, ..judgement(9, deny) }),
                "denied: a rule about ports could decide at the receiver (ingress), and the packet shows none",
            ),
        ] {
            assert_eq!(sentence(egress, ingress), wanted);
        }
        let torn = PolicyExplanation { verdict: deny, ..answer(None, None) };
        assert!(explanation(&torn, &Style::plain()).starts_with("denied: the agent does not say by which end\n"));
    }

    fn redirected(problem: Option<&str>, fails_open: bool) -> PolicyJudgement {
        let passes = ["GET /public...", "POST /cart"].map(str::to_owned).into();
        let redirect = Some(PolicyRedirect { port: 15_000, passes, fails_open, problem: problem.map(str::to_owned) });
        PolicyJudgement { rule: rule(), redirect, ..judgement(9, PolicyVerdict::Accept) }
    }

    #[test]
    fn a_flow_through_the_proxy_is_told_with_what_passes_there() {
        let told = "accepted: NetworkPolicy shop/db allows it at the receiver (ingress); the proxy judges what it carries, and lets \
                    pass: GET /public... | POST /cart";
        assert_eq!(sentence(None, Some(redirected(None, false))), told);
        let why = "no proxy serves (Envoy is absent)";
        let dropped = format!("denied: a rule hands it to the proxy (port 15000) at the receiver (ingress), and {why}");
        assert_eq!(sentence(None, Some(redirected(Some(why), false))), dropped);
        let unseen = format!("{told}; but {why}: until then it passes unseen (failOpen)");
        assert_eq!(sentence(None, Some(redirected(Some(why), true))), unseen);
        insta::assert_snapshot!(explanation(&answer(None, Some(redirected(Some(why), false))), &Style::plain()));
    }

    #[test]
    fn both_judgements_are_shown() {
        let accepts = PolicyJudgement { rule: rule(), ..judgement(7, PolicyVerdict::Accept) };
        let note = Some(format!("audit mode is on: the packet passes all the same {HOSTILE}"));
        let denied = isolated(9, &["NetworkPolicy shop/db"]);
        let told = PolicyExplanation { note, ..answer(Some(accepts), Some(denied)) };
        let shown = explanation(&told, &Style::plain());
        assert!(shown.lines().all(|line| line.chars().count() <= 100), "{shown}");
        insta::assert_snapshot!(shown);
    }

    #[test]
    fn an_end_that_is_no_endpoint_is_told() {
        let unenforced = PolicyJudgement { enforced: false, rule_set: 0, ..judgement(9, PolicyVerdict::Accept) };
        insta::assert_snapshot!(explanation(&answer(None, Some(unenforced)), &Style::plain()));
    }
}
