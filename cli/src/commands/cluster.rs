//! `wharf cluster ...`.

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
            cx.out.emit(&view, |_| cluster::status(&view))?;
            Ok(Exit::well(cluster::is_well(&view)))
        }
        ClusterCommand::Nodes(follow) => {
            let ask = async || Ok(Answer::plain(cx.client.cluster().await?));
            repeat::show(cx, follow.watch, ask, cluster::nodes).await?;
            Ok(Exit::Ok)
        }
    }
}
