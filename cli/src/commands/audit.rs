//! `wharf audit`.

use serde::Serialize;
use wharf_api::AuditReport;

use super::Context;
use crate::{
    args::AuditArgs,
    error::{CliError, Exit},
    output::remark,
    render::audit::{examined, findings, words},
};

/// `wharf audit --repair -o json`.
#[derive(Debug, Serialize)]
struct Repair<'a> {
    /// With results of the repair.
    repaired: &'a AuditReport,
    /// From a second audit.
    remaining: &'a AuditReport,
}

pub(super) async fn run(cx: &Context, args: &AuditArgs) -> Result<Exit, CliError> {
    let mut all_mended = true;
    let report = if args.repair {
        let repaired = cx.client.audit(true).await?;
        let remaining = cx.client.audit(false).await?;
        all_mended = repaired.findings.iter().all(|f| f.repair.as_deref().is_none_or(|r| r == "mended"));
        let both = Repair { repaired: &repaired, remaining: &remaining };
        cx.out.emit(&both, |style| findings(&remaining, style))?;
        if cx.out.is_table() {
            // `remaining` has the other findings.
            for finding in repaired.findings.iter().filter(|f| f.repair.is_some()) {
                remark(&format!("repair: {}", words(finding)));
            }
        }
        remaining
    } else {
        let report = cx.client.audit(false).await?;
        cx.out.emit(&report, |style| findings(&report, style))?;
        report
    };
    // Empty standard output means healthy.
    if cx.out.is_table() {
        let summary = if report.findings.is_empty() {
            format!("nothing amiss ({})", examined(&report))
        } else {
            let repairable = report.findings.iter().filter(|f| f.repairable).count();
            let hint = if repairable > 0 && !args.repair { "; `wharf audit --repair` repairs those" } else { "" };
            format!("{} found, {repairable} repairable ({}){hint}", report.findings.len(), examined(&report))
        };
        remark(&summary);
    }
    Ok(Exit::well(report.findings.is_empty() && all_mended))
}
