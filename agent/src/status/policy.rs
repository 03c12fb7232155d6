//! Network policy.

use std::sync::Arc;

use wharf_api::{ComponentStatus, Health};
use wharf_core::policy::Enforcement;

use super::Source;
use crate::{node::part::Fill, policy::Summary};

pub(super) fn source() -> Source {
    Source {
        name: "policy",
        look: |node| Box::pin(async move { look(node.life.policy.summary().await) }),
        silent: |_| (Health::Degraded, "a change of policy waits for the kernel".into()),
    }
}

fn look(summary: Summary) -> Fill {
    Arc::new(move |status| status.components.push(component(&summary)))
}

fn component(summary: &Summary) -> ComponentStatus {
    let Summary { policies, revision, realized, enforcement, audits, without_labels, problem } = summary;
    let mut message = match policies {
        0 => "no policies".to_owned(),
        1 => "1 policy".to_owned(),
        _ => format!("{policies} policies"),
    };
    if *revision > 0 {
        message += &format!(", revision {revision}");
    }
    message += match enforcement {
        Enforcement::Default => "",
        Enforcement::Always => "; endpoints without one accept nothing (always)",
        Enforcement::Never => "; none is enforced (never)",
    };
    if *audits {
        message += "; audit: what they would drop passes";
    }
    match without_labels {
        0 => {}
        1 => message += "; 1 endpoint waits for its labels",
        _ => message += &format!("; {without_labels} endpoints wait for their labels"),
    }
    if realized < revision {
        message += &format!("; in force is revision {realized}");
    }
    if let Some(why) = problem.as_deref().and_then(|why| why.lines().next()) {
        message += &format!("; {why}");
    }
    let amiss = problem.is_some() || realized < revision;
    ComponentStatus::new("policy", super::of(amiss, Health::Degraded), message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_in_force_is_told() {
        let summary = Summary {
            policies: 2,
            revision: 4,
            realized: 4,
            enforcement: Enforcement::Default,
            audits: false,
            without_labels: 0,
            problem: None,
        };
        let row = component(&summary);
        assert_eq!((row.health, row.message.as_str()), (Health::Ok, "2 policies, revision 4"));
        let row = component(&Summary { realized: 3, problem: Some("a\nb".into()), ..summary.clone() });
        assert_eq!(row.health, Health::Degraded);
        assert_eq!(row.message, "2 policies, revision 4; in force is revision 3; a");
        let row = component(&Summary { without_labels: 2, ..summary.clone() });
        assert_eq!(row.message, "2 policies, revision 4; 2 endpoints wait for their labels");
        let row = component(&Summary { audits: true, enforcement: Enforcement::Never, ..summary });
        assert!(row.message.contains("none is enforced") && row.message.contains("audit"), "{}", row.message);
    }
}
