//! `wharf explain`.

use std::time::Duration;

use wharf_api::{ADMIN_SOCKET, Explanation, Health, SubjectKind, client::Client};

use super::Context;
use crate::{
    args::ExplainArgs,
    error::{CliError, Exit},
    output::remark,
    render::{explain, status::FROM_ADMIN},
};

/// Exceeds the sum of the agent's deadlines for kernel, store and deletion queue.
const API_PATIENCE: Duration = Duration::from_secs(10);

pub(super) async fn run(cx: &Context, args: &ExplainArgs) -> Result<Exit, CliError> {
    let e = ask(cx, args.subject.as_str()).await?;
    cx.out.emit(&e, |style| explain::explain(&e, style))?;
    Ok(match (e.kind, e.health) {
        // A more specific name is needed.
        (SubjectKind::Several, _) => Exit::Usage,
        (SubjectKind::Unknown, _) => Exit::Unwell,
        (_, health) => Exit::well(health <= Health::Pending),
    })
}

/// Falls back to the admin thread.
async fn ask(cx: &Context, subject: &str) -> Result<Explanation, CliError> {
    let error = match cx.client.clone().with_timeout(API_PATIENCE).explain(subject).await {
        Err(e) if e.is_unreachable() => e,
        answer => return Ok(answer?),
    };
    let admin = Client::new(cx.client.socket().with_file_name(ADMIN_SOCKET)).with_timeout(API_PATIENCE);
    // Without any answer, report the API's error.
    let answer = admin.explain(subject).await.map_err(|_| CliError::from(error))?;
    remark(&format!("wharf: {FROM_ADMIN}"));
    Ok(answer)
}
