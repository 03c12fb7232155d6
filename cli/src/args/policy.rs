//! Arguments of `wharf policy`.

use std::path::PathBuf;

use clap::{Subcommand, ValueHint};

/// `wharf policy ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Check policy documents without an agent: show what each policy means, or why a document is refused.
    ///
    /// Wharf does not enforce policies yet; this command checks documents. It reads NetworkPolicy, ClusterNetworkPolicy,
    /// CiliumNetworkPolicy and CiliumClusterwideNetworkPolicy as YAML or JSON. A field that is not understood is refused,
    /// not skipped. When a file is refused, the others are checked too, and standard output stays empty.
    ///
    /// TIER is when the policy decides: admin and baseline with the priority (lower first), or namespaced. SUBJECT is the
    /// set of endpoints that the policy is about. ISOLATES names the directions in which they accept only what a rule
    /// accepts. RULES is the number of ingress and egress rules.
    #[command(after_help = "\
Exit status:
  0  every document is valid
  1  a document is refused, or a file cannot be read; standard error says why
  3  the command line is wrong

Examples:
  wharf policy validate web.yaml
  wharf policy validate policies/ extra.json
  wharf policy validate policies/ -o json | jq '.[] | select(.isolates == [])'
  kubectl get networkpolicies -A -o yaml | wharf policy validate -")]
    Validate {
        /// A file, `-` for standard input, or a directory: its *.yaml, *.yml and *.json, not those of its subdirectories.
        #[arg(required = true, value_name = "FILE", value_hint = ValueHint::AnyPath)]
        files: Vec<PathBuf>,
    },
}
