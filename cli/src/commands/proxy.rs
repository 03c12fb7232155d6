//! `wharf proxy ...`.

use serde::{Serialize, Serializer};
use wharf_api::ProxyView;

use super::{
    Context,
    repeat::{self, Answer},
};
use crate::{
    args::ProxyCommand,
    error::{CliError, Exit},
    render::proxy,
};

pub(super) async fn run(cx: &Context, command: &ProxyCommand) -> Result<Exit, CliError> {
    let view = async || cx.client.proxy().await;
    match command {
        ProxyCommand::Status(follow) if follow.watch => {
            repeat::show(cx, true, async || Ok(Answer::plain(view().await?)), proxy::status).await?;
        }
        ProxyCommand::Status(_) => {
            let view = view().await?;
            cx.out.emit(&view, |style| proxy::status(&view, style))?;
            return Ok(Exit::well(proxy::is_well(&view)));
        }
        ProxyCommand::Listeners(follow) => {
            let wide = cx.out.is_wide();
            let ask = async || Ok(Answer::plain(Listeners(view().await?)));
            repeat::show(cx, follow.watch, ask, |Listeners(view), style| proxy::listeners(view, style, wide)).await?;
        }
        ProxyCommand::Names(follow) => {
            let ask = async || Ok(Answer::plain(cx.client.proxy_names().await?));
            repeat::show(cx, follow.watch, ask, |names, style| proxy::names(names, style)).await?;
        }
        ProxyCommand::Completions(follow) => {
            let ask = async || Ok(Answer::plain(Completions(view().await?)));
            repeat::show(cx, follow.watch, ask, |Completions(view), style| proxy::completions(view, style)).await?;
        }
    }
    Ok(Exit::Ok)
}

struct Listeners(ProxyView);

impl Serialize for Listeners {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.listeners.serialize(serializer)
    }
}

struct Completions(ProxyView);

impl Serialize for Completions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.completions.serialize(serializer)
    }
}
