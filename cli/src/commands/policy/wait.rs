//! `wharf policy wait`.

use std::time::Duration;

use wharf_api::PolicyList;

use super::super::Context;
use crate::{
    error::{CliError, Exit},
    render::text::span,
};

/// A change takes milliseconds; a poll lists all policies.
const INTERVAL: Duration = Duration::from_millis(250);

/// Waits for the first reported revision by default.
pub(super) async fn run(cx: &Context, revision: Option<u64>, timeout: Duration) -> Result<Exit, CliError> {
    let mut wanted = revision;
    let mut last = None;
    let looks = async {
        loop {
            let found = cx.client.policies().await?;
            let revision = *wanted.get_or_insert(found.revision);
            if found.realized >= revision {
                return Ok::<_, CliError>((found, revision));
            }
            last = Some(found);
            tokio::time::sleep(INTERVAL).await;
        }
    };
    if let Ok(looked) = tokio::time::timeout(timeout, looks).await {
        let (found, revision) = looked?;
        cx.out.emit(&found, |_| format!("revision {revision} is in force\n"))?;
        return Ok(Exit::Ok);
    }
    Err(too_late(last.as_ref(), wanted, timeout))
}

fn too_late(last: Option<&PolicyList>, wanted: Option<u64>, timeout: Duration) -> CliError {
    // `span` has whole seconds.
    let after = if timeout.as_secs() == 0 {
        format!("{} ms", timeout.as_millis())
    } else {
        span(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX))
    };
    let (Some(last), Some(wanted)) = (last, wanted) else {
        let message = format!("wait for a revision of the policies: no answer from the agent within {after}");
        return CliError { exit: Exit::Unreachable, message, hint: None };
    };
    let PolicyList { revision, realized, problem, .. } = last;
    let message = format!("wait for revision {wanted} of the policies: after {after}, revision {realized} is in force");
    match problem {
        Some(problem) => CliError::refused(format!("{message}: {problem}")),
        None if wanted > *revision => CliError::refused(message)
            .hint(format!("the agent has revision {revision}; a later one comes with the next change")),
        None => CliError::refused(message).hint("the agent still works on it; wait again, with a longer --timeout"),
    }
}
