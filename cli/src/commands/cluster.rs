//! `wharf cluster ...`.

use std::cell::Cell;

use wharf_api::ClusterPodsQuery;

use super::{
    Context,
    repeat::{self, Answer},
};
use crate::{
    args::ClusterCommand,
    error::{CliError, Exit},
    render::cluster,
};

pub(super) async fn run(cx: &Context, command: &ClusterCommand) -> Result<Exit, CliError> {
    match command {
        ClusterCommand::Status => {
            let view = cx.client.cluster().await?;
            cx.out.emit(&view, |style| cluster::status(&view, style.now_unix_ms))?;
            Ok(Exit::well(cluster::is_well(&view)))
        }
        ClusterCommand::Nodes(follow) => {
            let ask = async || Ok(Answer::plain(cx.client.cluster().await?));
            repeat::show(cx, follow.watch, ask, cluster::nodes).await?;
            Ok(Exit::Ok)
        }
        ClusterCommand::Pods { namespace, node, limit, follow } => {
            let query = ClusterPodsQuery { namespace: namespace.clone(), node: node.clone(), limit: Some(*limit) };
            let ask = async || Ok(Answer::plain(cx.client.cluster_pods(&query).await?));
            repeat::show(cx, follow.watch, ask, cluster::pods).await?;
            Ok(Exit::Ok)
        }
        ClusterCommand::Feed(follow) => {
            let is_well = Cell::new(true);
            let ask = async || {
                let feed = cx.client.cluster().await?.feed;
                is_well.set(feed.as_ref().is_none_or(|feed| feed.problem.is_none()));
                Ok(Answer::plain(feed))
            };
            repeat::show(cx, follow.watch, ask, |feed, style| cluster::feed(feed.as_ref(), style)).await?;
            Ok(Exit::well(is_well.get()))
        }
    }
}
