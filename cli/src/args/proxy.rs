//! Arguments of `wharf proxy`.

use clap::Subcommand;

use super::list::Follow;

/// `wharf proxy ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum ProxyCommand {
    /// Show how Envoy is: its process, what it judged, and what it has not done.
    ///
    /// Exits 0 when it serves what rules need, or none does; 1 when it does not, or refused a listener; 2 when the
    /// agent cannot be reached.
    #[command(after_help = "Examples:\n  wharf proxy status\n  wharf proxy status -o json | jq .requests")]
    Status(Follow),
    /// List the ports of the proxy: whose connections they take, and what passes.
    #[command(
        visible_alias = "ls",
        after_help = "\
Examples:
  wharf proxy listeners
  wharf proxy listeners --watch
  wharf proxy listeners -o wide                every entry of what passes
  wharf proxy listeners -o json | jq '.[] | select(.acknowledged | not)'"
    )]
    Listeners(Follow),
    /// List names that containers asked DNS for, and their addresses: rules with toFQDNs follow them.
    #[command(after_help = "\
Examples:
  wharf proxy names
  wharf proxy names -o json | jq '.[] | select(.name | endswith(\".example.com\"))'")]
    Names(Follow),
    /// List who waits for the proxy now: since when, and until when at most.
    #[command(after_help = "Examples:\n  wharf proxy completions\n  wharf proxy completions -o json")]
    Completions(Follow),
}
