//! Arguments of `wharf cluster`.

use clap::Subcommand;

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
}
