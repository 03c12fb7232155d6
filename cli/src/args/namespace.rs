//! Arguments of `wharf namespace`.

use clap::Subcommand;

use super::label::{LabelChanges, Labels};

/// `wharf namespace ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum NamespaceCommand {
    /// List the namespaces whose labels are known.
    #[command(visible_alias = "ls", after_help = "Examples:\n  wharf namespace list\n  wharf namespace list -o json")]
    List,
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
        name: String,
        /// Labels that are set or, with `KEY-`, removed.
        #[arg(value_name = "KEY=VALUE|KEY-", required = true)]
        changes: Vec<LabelChanges>,
    },
    /// Replace the labels of a namespace: those that are not named go.
    #[command(after_help = "Example:\n  wharf namespace set shop team=a,stage=production")]
    Set {
        /// The namespace.
        name: String,
        /// Labels of the new set.
        #[arg(value_name = "KEY=VALUE", required = true)]
        labels: Vec<Labels>,
    },
    /// Forget the labels of a namespace.
    #[command(after_help = "Example:\n  wharf namespace delete shop")]
    Delete {
        /// The namespace.
        name: String,
    },
}
