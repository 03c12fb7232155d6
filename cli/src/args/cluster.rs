//! Arguments of `wharf cluster`.

use clap::Subcommand;
use wharf_api::{PODS_DEFAULT, PODS_MOST};

use super::list::Follow;

/// `wharf cluster ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum ClusterCommand {
    /// Show whether this node reaches the containers of all others.
    ///
    /// Exits 0 when it does, or when there is no cluster; 1 when it does not; 2 when the agent cannot be reached.
    #[command(after_help = "Examples:\n  wharf cluster status\n  wharf cluster status -o json | jq .problem")]
    Status,
    /// List the nodes of the cluster, and this node's routes to their containers.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf cluster nodes
  wharf cluster nodes --watch
  wharf cluster nodes -o json | jq '.nodes[].pod_cidrs[] | select(.state == \"refused\")'"
    )]
    Nodes(Follow),
    /// List the pods of the cluster feed, with this node's.
    #[command(after_help = "\
Examples:
  wharf cluster pods
  wharf cluster pods --node b --namespace shop
  wharf cluster pods -o json | jq '.pods[] | {name, labels}'")]
    Pods {
        /// Of this namespace.
        #[arg(short, long, value_name = "NAMESPACE")]
        namespace: Option<String>,
        /// Of this node.
        #[arg(long, value_name = "NODE")]
        node: Option<String>,
        /// So many pods at most.
        #[arg(long, value_name = "N", default_value_t = PODS_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=i64::from(PODS_MOST)))]
        limit: u32,
        #[command(flatten)]
        follow: Follow,
    },
    /// Show the cluster feed: its producer, its rows, and the rows that are refused.
    ///
    /// Exits 0 when a producer is connected, has sent every row, and none is refused, or without a feed; 1 when not;
    /// 2 when the agent cannot be reached.
    #[command(after_help = "\
Examples:
  wharf cluster feed
  wharf cluster feed --watch
  wharf cluster feed -o json | jq '.refused[] | select(.stale)'")]
    Feed(Follow),
}
