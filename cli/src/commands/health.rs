//! `wharf health ...`.

use super::{
    Context,
    repeat::{self, Answer},
};
use crate::{
    args::HealthCommand,
    error::{CliError, Exit},
    render::health,
};

pub(super) async fn run(cx: &Context, command: &HealthCommand) -> Result<Exit, CliError> {
    let report = match command {
        HealthCommand::Status(follow) if follow.watch => {
            let ask = async || Ok(Answer::plain(cx.client.health().await?));
            repeat::show(cx, true, ask, health::report).await?;
            return Ok(Exit::Ok);
        }
        HealthCommand::Status(_) => cx.client.health().await?,
        HealthCommand::Probe => cx.client.probe_health().await?,
    };
    cx.out.emit(&report, |style| health::report(&report, style))?;
    // A probe covers only this node.
    let is_well = match command {
        HealthCommand::Probe => health::is_well_here(&report),
        HealthCommand::Status(_) => health::is_well(&report),
    };
    Ok(Exit::well(is_well))
}
