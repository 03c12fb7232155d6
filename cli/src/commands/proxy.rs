//! `wharf proxy ...`.

use super::Context;
use crate::{
    args::ProxyCommand,
    error::{CliError, Exit},
    render::proxy,
};

pub(super) async fn run(cx: &Context, command: &ProxyCommand) -> Result<Exit, CliError> {
    if let ProxyCommand::Names = command {
        let names = cx.client.proxy_names().await?;
        cx.out.emit(&names, |style| proxy::names(&names, style))?;
        return Ok(Exit::Ok);
    }
    let view = cx.client.proxy().await?;
    match command {
        ProxyCommand::Status => {
            cx.out.emit(&view, |style| proxy::status(&view, style))?;
            return Ok(Exit::well(proxy::is_well(&view)));
        }
        ProxyCommand::Listeners => {
            let wide = cx.out.is_wide();
            cx.out.emit(&view.listeners, |style| proxy::listeners(&view, style, wide))?;
        }
        ProxyCommand::Names => {}
        ProxyCommand::Completions => cx.out.emit(&view.completions, |style| proxy::completions(&view, style))?,
    }
    Ok(Exit::Ok)
}
