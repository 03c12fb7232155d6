//! Network policies of users: a text is read or refused as a whole.

use wharf_policy::{
    model::{Action, Directions, Holds, LabelOf, Peer, Policy, Port, Rule, Selector, Tier},
    read::{Refusal, read},
};

/// Maximum bytes of a refusal.
const MAX_REFUSAL: usize = 2000;
/// Maximum refusals of a text, with the line that counts them.
const MAX_REFUSALS: usize = 21;

/// Reads a text of documents.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match read("f", text) {
        Ok(policies) => {
            for policy in &policies {
                accepted(policy);
            }
            assert_eq!(read("f", text).as_ref(), Ok(&policies), "a text has two meanings");
        }
        Err(refusals) => refused(&refusals),
    }
}

fn accepted(policy: &Policy) {
    assert!(policy.rules.len() <= 10_000);
    assert!(policy.origin.line > 0 && policy.origin.document.as_ref() == policy.name.to_string());
    match policy.tier {
        Tier::Namespaced => assert_eq!(policy.priority, 0, "the namespaced tier has no order"),
        Tier::Admin | Tier::Baseline => {
            assert_eq!(policy.isolates, Directions::default(), "an ordered policy isolates");
            assert!(policy.priority <= 1000);
        }
    }
    selector(&policy.subject);
    for rule in &policy.rules {
        assert!(rule.origin.line >= policy.origin.line, "a rule stands before its policy");
        assert!(policy.tier != Tier::Namespaced || rule.action != Action::Pass);
        matches(rule);
    }
}

fn matches(rule: &Rule) {
    for peer in rule.peers.iter().flatten() {
        match peer {
            Peer::Endpoints(of) => selector(of),
            Peer::Network { net, except } => {
                assert_eq!(*net, net.trunc(), "host bits");
                let inside = |except: &ipnet::IpNet| net.contains(except) && net != except && *except == except.trunc();
                assert!(except.iter().all(inside), "{net} but {except:?}");
            }
            Peer::Entity(_) | Peer::Names(_) => {}
        }
    }
    for port in rule.ports.iter().flatten() {
        match port {
            Port::Numbers { ports, .. } => assert!(ports.first <= ports.last),
            Port::Named { name, .. } => assert!((1..=15).contains(&name.len())),
            Port::Icmp { .. } => {}
        }
    }
}

fn selector(Selector(requirements): &Selector) {
    for requirement in requirements {
        assert_eq!(requirement.of == LabelOf::Endpoint, requirement.key.contains(':'), "{requirement:?}");
        if let Holds::In(values) | Holds::NotIn(values) = &requirement.holds {
            assert!(!values.is_empty());
        }
    }
}

/// A refusal has a place and one line, and quotes little.
fn refused(refusals: &[Refusal]) {
    assert!((1..=MAX_REFUSALS).contains(&refusals.len()));
    for refusal in refusals {
        let told = refusal.to_string();
        assert!(told.starts_with("f:") && told.contains("; ") && told.len() <= MAX_REFUSAL, "{told}");
        assert!(!told.contains(char::is_control), "{told:?}");
    }
}
