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

/// Time limit of the API before the admin thread is asked. It exceeds the agent's consecutive deadlines for the
/// kernel, the store and the deletion queue.
const API_PATIENCE: Duration = Duration::from_secs(10);

pub(super) async fn run(cx: &Context, args: &ExplainArgs) -> Result<Exit, CliError> {
    let e = ask(cx, args.subject.as_str()).await?;
    cx.out.emit(&e, |style| explain::explain(&e, style))?;
    Ok(match (e.kind, e.health) {
        // The operator must ask again with a more specific name.
        (SubjectKind::Several, _) => Exit::Usage,
        (SubjectKind::Unknown, _) => Exit::Unwell,
        (_, health) => Exit::well(health <= Health::Pending),
    })
}

/// Asks the API, or the admin thread on the socket in the same directory when the API does not answer.
async fn ask(cx: &Context, subject: &str) -> Result<Explanation, CliError> {
    let error = match cx.client.clone().with_timeout(API_PATIENCE).explain(subject).await {
        Err(e) if e.is_unreachable() => e,
        answer => return Ok(answer?),
    };
    let admin = Client::new(cx.client.socket().with_file_name(ADMIN_SOCKET)).with_timeout(API_PATIENCE);
    // When neither answers, report the error of the API.
    let answer = admin.explain(subject).await.map_err(|_| CliError::from(error))?;
    remark(&format!("wharf: {FROM_ADMIN}"));
    Ok(answer)
}
