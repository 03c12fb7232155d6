//! Arguments of `wharf namespace`.

use clap::Subcommand;

use super::{
    label::{LabelChanges, Labels},
    list::{Follow, NamespaceName},
};
use crate::selector::Selector;

/// `wharf namespace ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum NamespaceCommand {
    /// List the namespaces whose labels are known.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf namespace list
  wharf namespace list -l team=a
  wharf namespace list -o json"
    )]
    List {
        /// With these labels, as kubectl selects: team=a, stage!=test, 'team in (a,b)', team, '!team'.
        #[arg(short = 'l', long, value_name = "SELECTOR")]
        selector: Option<Selector>,
        #[command(flatten)]
        follow: Follow,
    },
    /// Show the labels of one namespace; without a name as `list`.
    #[command(after_help = "Examples:\n  wharf namespace get\n  wharf namespace get shop")]
    Get {
        /// The namespace.
        #[arg(value_name = "NAMESPACE")]
        name: Option<NamespaceName>,
    },
    /// Show a namespace: its labels, its policies and its endpoints on this node.
    #[command(after_help = "Example:\n  wharf namespace describe shop")]
    Describe {
        /// The namespace.
        #[arg(value_name = "NAMESPACE")]
        name: NamespaceName,
    },
    /// Change labels of a namespace: those that are not named stay.
    #[command(
        visible_alias = "labels",
        after_help = "\
Examples:
  wharf namespace label shop team=a,stage=production
  wharf namespace label shop stage-                  removes the label"
    )]
    Label {
        /// The namespace.
        #[arg(value_name = "NAMESPACE")]
        name: NamespaceName,
        /// Labels that are set or, with `KEY-`, removed.
        #[arg(value_name = "KEY=VALUE|KEY-", required = true)]
        changes: Vec<LabelChanges>,
    },
    /// Replace the labels of a namespace: those that are not named go.
    #[command(after_help = "Example:\n  wharf namespace set shop team=a,stage=production")]
    Set {
        /// The namespace.
        name: NamespaceName,
        /// Labels of the new set.
        #[arg(value_name = "KEY=VALUE", required = true)]
        labels: Vec<Labels>,
    },
    /// Forget the labels of a namespace.
    #[command(after_help = "Example:\n  wharf namespace delete shop")]
    Delete {
        /// The namespace.
        name: NamespaceName,
    },
}
