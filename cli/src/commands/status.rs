//! `wharf status` and `wharf version`.

use std::time::Duration;

use serde::Serialize;
use wharf_api::{
    ADMIN_SOCKET, AgentStatus, Verdict,
    client::{Client, ClientError},
};

use super::{
    Context, STATUS_TIMEOUT,
    repeat::{self, Answer},
};
use crate::{
    args::StatusArgs,
    error::{CliError, Exit},
    output::{remark, write_text},
    render::status::{self, Detail},
};

/// The agent answers in half of it unless its main runtime is stuck.
const API_PATIENCE: Duration = Duration::from_secs(3);

pub(super) async fn run(cx: &Context, args: &StatusArgs) -> Result<Exit, CliError> {
    let all = args.all_controllers || args.verbose;
    let detail = Detail { verbose: args.verbose, all_controllers: args.all_controllers };
    if args.follow.watch {
        let ask = async || Ok(Answer::plain(ask(cx, all).await?));
        repeat::show(cx, true, ask, |s, style| status::status(s, style, detail)).await?;
        return Ok(Exit::Ok);
    }
    let answer = ask(cx, all).await;
    let verdict = if args.ready { AgentStatus::readiness } else { AgentStatus::verdict };
    let one_word = args.brief || args.ready;
    if one_word {
        write_text(&format!("{}\n", word(&answer, verdict)))?;
    }
    let s = answer.map_err(|e| CliError { exit: Exit::Unreachable, ..e.into() })?;
    if s.from_admin && (one_word || !cx.out.is_table()) {
        remark(&format!("wharf: {}", status::FROM_ADMIN));
    }
    if !one_word {
        cx.out.emit(&s, |style| status::status(&s, style, detail))?;
    }
    Ok(verdict(&s).into())
}

/// Word for `--brief` and `--ready`. Without permission, the agent's state is unknown.
fn word(answer: &Result<AgentStatus, ClientError>, verdict: fn(&AgentStatus) -> Verdict) -> &'static str {
    match answer {
        Ok(status) => verdict(status).as_str(),
        Err(error) if error.is_no_permission() => "no-permission",
        Err(_) => Verdict::Down.as_str(),
    }
}

/// Falls back to the admin thread.
async fn ask(cx: &Context, all_controllers: bool) -> Result<AgentStatus, ClientError> {
    let error = match cx.client.clone().with_timeout(API_PATIENCE).status_of(all_controllers).await {
        Err(e) if e.is_unreachable() => e,
        answer => return answer,
    };
    let admin = Client::new(cx.client.socket().with_file_name(ADMIN_SOCKET)).with_timeout(STATUS_TIMEOUT);
    // Without any answer, report the API's error.
    let mut status = admin.status_of(all_controllers).await.map_err(|_| error)?;
    status.overall = status.overall.max(wharf_api::Health::Degraded);
    Ok(status)
}

#[derive(Debug, Serialize)]
struct Versions {
    client: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<AgentVersion>,
}

#[derive(Debug, Serialize)]
struct AgentVersion {
    version: String,
    abi_version: u32,
}

pub(super) async fn version(cx: &Context, client_only: bool) -> Result<Exit, CliError> {
    let client = env!("CARGO_PKG_VERSION");
    // Also without an answer from the agent.
    if cx.out.is_table() {
        write_text(&format!("wharf:        {client}\n"))?;
    }
    let agent = if client_only {
        None
    } else {
        let s = ask(cx, false).await?;
        Some(AgentVersion { version: s.version, abi_version: s.abi_version })
    };
    let versions = Versions { client, agent };
    cx.out.emit(&versions, |_| match &versions.agent {
        Some(a) => format!("wharf-agent:  {} (ABI {})\n", crate::render::text::safe(&a.version), a.abi_version),
        None => String::new(),
    })?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn an_agent_that_may_not_be_asked_is_not_called_down() {
        let failed = |kind: io::ErrorKind| {
            let error = ClientError::Connect { socket: "x".into(), cause: kind.into() };
            word(&Err(error), AgentStatus::verdict)
        };
        assert_eq!(failed(io::ErrorKind::PermissionDenied), "no-permission");
        assert_eq!(failed(io::ErrorKind::NotFound), "down");
        assert_eq!(failed(io::ErrorKind::ConnectionRefused), "down");
        assert_eq!(failed(io::ErrorKind::TimedOut), "down");
    }
}
