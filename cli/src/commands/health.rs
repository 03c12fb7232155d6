//! `wharf health ...`.

use super::Context;
use crate::{
    args::HealthCommand,
    error::{CliError, Exit},
    render::health,
};

pub(super) async fn run(cx: &Context, command: &HealthCommand) -> Result<Exit, CliError> {
    let report = match command {
        HealthCommand::Status => cx.client.health().await?,
        HealthCommand::Probe => cx.client.probe_health().await?,
    };
    cx.out.emit(&report, |style| health::report(&report, style))?;
    Ok(Exit::well(health::is_well(&report)))
}
