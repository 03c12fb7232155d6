//! `wharf audit`.

use wharf_api::{AuditReport, Finding};

use super::{Style, Tone, screen::wrap, text};

const INDENT: &str = "    ";

pub(crate) fn words(f: &Finding) -> String {
    let mut out = format!("{} {}: {}", f.object, f.subject, f.problem);
    if let Some(owner) = &f.owner {
        out.push_str(&format!(" (owner {owner})"));
    }
    if let Some(repair) = &f.repair {
        out.push_str(&format!("; repair: {repair}"));
    }
    text::safe(&out)
}

/// Prints a common remedy once, after its last finding.
pub(crate) fn findings(report: &AuditReport, style: &Style) -> String {
    let mut out = String::new();
    // Unindented lines start findings.
    let room = usize::from(style.width).saturating_sub(INDENT.len()).max(20);
    for (n, f) in report.findings.iter().enumerate() {
        let tone = if f.repairable { Tone::Warn } else { Tone::Bad };
        for (i, part) in wrap(&words(f), room).into_iter().enumerate() {
            out.push_str(if i == 0 { "" } else { INDENT });
            out.push_str(&style.paint(tone, &part));
            out.push('\n');
        }
        let follows = report.findings.get(n + 1).is_some_and(|next| next.remedy == f.remedy);
        if !f.remedy.is_empty() && !follows {
            for part in wrap(&format!("-> {}", text::safe(&f.remedy)), room) {
                out.push_str(&format!("{INDENT}{part}\n"));
            }
        }
    }
    out
}

pub(crate) fn examined(report: &AuditReport) -> String {
    let parts: Vec<String> = report.examined.iter().map(|(kind, n)| format!("{} {n}", text::safe(kind))).collect();
    if parts.is_empty() { "nothing examined".to_owned() } else { format!("examined: {}", parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample::HOSTILE;

    #[test]
    fn a_line_a_finding() {
        let finding = Finding {
            object: "link".to_owned(),
            subject: "wh0007a1b2".to_owned(),
            problem: "in the kernel, but no endpoint has it".to_owned(),
            owner: Some("wharf/3f9c51aa01b2:eth0".to_owned()),
            repairable: true,
            ..Finding::default()
        };
        let remedied = Finding { remedy: "recreate the container".to_owned(), ..finding.clone() };
        let hostile = Finding {
            subject: HOSTILE.to_owned(),
            owner: None,
            repair: Some("removed".to_owned()),
            ..remedied.clone()
        };
        let mut report = AuditReport { findings: vec![finding, remedied, hostile], ..AuditReport::default() };
        insta::assert_snapshot!(findings(&report, &Style::plain()), @r"
        link wh0007a1b2: in the kernel, but no endpoint has it (owner wharf/3f9c51aa01b2:eth0)
        link wh0007a1b2: in the kernel, but no endpoint has it (owner wharf/3f9c51aa01b2:eth0)
        link k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row: in the kernel, but no endpoint has it;
            repair: removed
            -> recreate the container
        ");
        report.findings.clear();
        assert_eq!(findings(&report, &Style::plain()), "");
    }

    #[test]
    fn what_was_examined() {
        let mut report = AuditReport::default();
        assert_eq!(examined(&report), "nothing examined");
        report.examined.insert("links".to_owned(), 2);
        report.examined.insert("pins".to_owned(), 14);
        assert_eq!(examined(&report), "examined: links 2, pins 14");
    }
}
