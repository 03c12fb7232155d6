//! `wharf status` and `wharf version`.

use serde::Serialize;

use super::{Context, STATUS_TIMEOUT};
use crate::{
    args::{Format, StatusArgs},
    error::{CliError, Exit},
    output::write_text,
    render::status::{self, Detail},
};

pub(super) async fn run(cx: &Context, args: &StatusArgs) -> Result<Exit, CliError> {
    let answer = cx.client.clone().with_timeout(STATUS_TIMEOUT).status().await;
    if args.brief {
        // A probe reads one word on standard output whatever happens; the reason is still said on standard error.
        let word = match &answer {
            Ok(s) => status::brief(s),
            Err(e) if e.is_unreachable() => "unreachable",
            Err(_) => "unknown",
        };
        write_text(&format!("{word}\n"))?;
        return Ok(Exit::well(answer?.serving));
    }
    let s = answer?;
    let detail = Detail { verbose: args.verbose, all_controllers: args.all_controllers };
    cx.out.emit(&s, |style| status::status(&s, style, detail))?;
    Ok(Exit::well(status::is_well(&s)))
}

/// `wharf version -o json`.
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
    // What is known is printed even when the agent does not answer; in a table it comes first anyway.
    if cx.out.format() == Format::Table {
        write_text(&format!("wharf:        {client}\n"))?;
    }
    let agent = if client_only {
        None
    } else {
        let s = cx.client.clone().with_timeout(STATUS_TIMEOUT).status().await?;
        Some(AgentVersion { version: s.version, abi_version: s.abi_version })
    };
    let versions = Versions { client, agent };
    cx.out.emit(&versions, |_| match &versions.agent {
        Some(a) => format!("wharf-agent:  {} (ABI {})\n", crate::render::text::safe(&a.version), a.abi_version),
        None => String::new(),
    })?;
    Ok(Exit::Ok)
}
