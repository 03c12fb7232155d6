//! Arguments of `wharf sandbox`.

use std::{ffi::OsString, net::IpAddr, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use wharf_sandbox::{Dirs, MacAddr, NetworkName, Port, SandboxName};

use super::{label::Labels, node::duration};

/// `wharf sandbox ...`.
#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    #[command(flatten)]
    pub(crate) places: Places,
    #[command(subcommand)]
    pub(crate) command: SandboxCommand,
}

/// Where sandboxes, networks and plugins are.
#[derive(Debug, Args)]
#[command(next_help_heading = "Places")]
pub(crate) struct Places {
    /// Records of the sandboxes, one file for each.
    #[arg(long, global = true, value_name = "DIR", env = "WHARF_SANDBOX_STATE_DIR", hide_env_values = true)]
    #[arg(default_value = "/var/lib/wharf/sandboxes")]
    state_dir: PathBuf,
    /// Directory of named network namespaces.
    #[arg(long, global = true, value_name = "DIR", env = "WHARF_SANDBOX_NETNS_DIR", hide_env_values = true)]
    #[arg(default_value = "/run/netns")]
    netns_dir: PathBuf,
    /// Network configurations (*.conflist, *.conf, *.json).
    #[arg(long, global = true, value_name = "DIR", env = "WHARF_CNI_CONF_DIR", hide_env_values = true)]
    #[arg(default_value = "/etc/cni/net.d")]
    conf_dir: PathBuf,
    /// CNI plugins; several directories with colons between.
    #[arg(long, global = true, value_name = "DIR[:DIR]", env = "WHARF_CNI_BIN_DIR", hide_env_values = true)]
    #[arg(default_value = "/opt/cni/bin:/usr/lib/cni")]
    cni_bin_dir: OsString,
}

impl Places {
    pub(crate) fn dirs(&self) -> Dirs {
        Dirs {
            state: self.state_dir.clone(),
            // Records keep the path for commands in other directories.
            netns: std::path::absolute(&self.netns_dir).unwrap_or_else(|_| self.netns_dir.clone()),
            conf: self.conf_dir.clone(),
            plugins: std::env::split_paths(&self.cni_bin_dir).collect(),
        }
    }
}

/// Commands about sandboxes.
#[derive(Debug, Subcommand)]
pub(crate) enum SandboxCommand {
    /// Make a sandbox and attach it to its networks. A failed create leaves nothing.
    #[command(after_help = "\
Examples:
  wharf sandbox create web                      on the first network of --conf-dir, as runtimes choose it
  wharf sandbox create web --network front --network back
  wharf sandbox create web --label app=web,tier=front
  wharf sandbox create web --publish 8080:80 --publish 127.0.0.1:5353:53/udp
  wharf sandbox create web --ip 10.87.0.40 --mac 02:00:00:00:00:40
  wharf sandbox create web --ip 10.87.0.40 --no-wait     fails at once while the address is in quarantine
  ip netns exec web ip -br addr                 it is a network namespace like any other")]
    Create {
        /// Its name.
        name: SandboxName,
        #[command(flatten)]
        wishes: CreateArgs,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Start stopped sandboxes: each gets a new namespace, attached to its networks with the labels, ports and
    /// addresses that its create asked for. Commands that ran in it are not started again.
    #[command(after_help = "\
Examples:
  wharf sandbox start web
  wharf sandbox list -o json | jq -r '.[] | select(.state == \"gone\") | .name' | xargs wharf sandbox start     after a reboot")]
    Start {
        /// Their names.
        #[arg(required = true)]
        names: Vec<SandboxName>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Run a command in a sandbox that is ready. It ends with the command's status, as `run` does.
    ///
    /// With -t the command has a new terminal of the size of this terminal. Without -i it has no input.
    #[command(after_help = "\
Examples:
  wharf sandbox exec web -- ip -br addr
  wharf sandbox exec -it web -- sh
  echo hello | wharf sandbox exec -i web -- cat")]
    Exec(ExecArgs),
    /// Run a command in a sandbox. Makes the sandbox if there is none.
    ///
    /// The command has the sandbox's network namespace, and a separate mount namespace with /sys of that network and,
    /// if a network names DNS servers, an /etc/resolv.conf. Standard input, standard output, SIGTERM and SIGHUP are
    /// passed through.
    #[command(after_help = "\
Exit status: that of the command, or 128 and the number of the signal that ended it.
  125  there is no sandbox for it
  126  it cannot be executed
  127  it is not found
  3    the command line is wrong

Examples:
  wharf sandbox run web -- python3 -m http.server 80
  wharf sandbox run --rm probe -- ping -c 1 10.87.0.2
  wharf sandbox run --rm probe --network front --label app=probe -- sh -c 'ip addr'
  wharf sandbox run --detach --log /var/log/web.log web -- python3 -m http.server 80")]
    Run(RunArgs),
    /// List sandboxes.
    #[command(
        visible_alias = "ls",
        after_help = "\
States:
  ready                            whole
  detached                         an interface is gone; stop, then start attaches it again
  stopped                          stopped by a command; start starts it
  stopped (its namespace is gone)  after a reboot; start starts it
  stopping                         its stop has not ended; the next stop or rm resumes it
  broken                           its create was interrupted or could not be taken back; rm does it
  damaged                          its record cannot be used; rm needs --force

Examples:
  wharf sandbox list
  wharf sandbox list -o json | jq -r '.[] | select(.state == \"ready\") | .addresses[0]'"
    )]
    List,
    /// Show everything about a sandbox, as JSON.
    #[command(after_help = "\
Examples:
  wharf sandbox inspect web
  wharf sandbox inspect web | jq '.attachments[].result.ips'
  wharf sandbox inspect web --check             exits 1 when a plugin's CHECK finds something amiss")]
    Inspect {
        /// Its name.
        name: SandboxName,
        /// Let the plugins check the interfaces that they made.
        #[arg(long)]
        check: bool,
    },
    /// End the processes in sandboxes and detach the sandboxes from their networks. The names stay.
    ///
    /// Each process in the network namespace, and each that `run` started, gets SIGTERM, and SIGKILL when the time is
    /// over. Stopping a stopped or unknown sandbox succeeds. The next stop resumes a failed one.
    #[command(after_help = "\
Examples:
  wharf sandbox stop web
  wharf sandbox stop web db --grace 30s")]
    Stop {
        /// Their names.
        #[arg(required = true)]
        names: Vec<SandboxName>,
        #[command(flatten)]
        grace: GraceArgs,
    },
    /// Remove sandboxes. Running ones are stopped first.
    #[command(
        visible_alias = "remove",
        after_help = "\
Examples:
  wharf sandbox rm web
  wharf sandbox rm web db
  wharf sandbox rm --force web                  also when its record is damaged; networks are not told then"
    )]
    Rm {
        /// Their names.
        #[arg(required = true)]
        names: Vec<SandboxName>,
        /// Remove a record that cannot be read.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        grace: GraceArgs,
    },
}

/// Settings of a new sandbox.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// A network, by the name in its configuration; several become eth0, eth1 and so on. Without: the first one of
    /// --conf-dir.
    #[arg(long = "network", value_name = "NET")]
    pub(crate) networks: Vec<NetworkName>,
    /// Labels, by which policies select; several with commas between, or by repeating the option.
    #[arg(long = "label", value_name = "KEY=VALUE")]
    pub(crate) labels: Vec<Labels>,
    /// A port of the node that leads to one of the sandbox, in its first network:
    /// `[HOSTIP:]HOST:CONTAINER[/tcp|udp|sctp]`.
    #[arg(long = "publish", value_name = "HOST:CONTAINER")]
    pub(crate) ports: Vec<Port>,
    /// An address in the first network; one of each family.
    #[arg(long = "ip", value_name = "ADDRESS")]
    pub(crate) ips: Vec<IpAddr>,
    /// The MAC address in the first network.
    #[arg(long, value_name = "MAC")]
    pub(crate) mac: Option<MacAddr>,
}

/// `wharf sandbox run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The sandbox.
    pub(crate) name: SandboxName,
    #[command(flatten)]
    pub(crate) wishes: CreateArgs,
    #[command(flatten)]
    pub(crate) wait: WaitArgs,
    /// Remove the sandbox when the command has ended, if this command made it.
    #[arg(long, conflicts_with = "detach")]
    pub(crate) rm: bool,
    /// Do not wait for the command; print its process id.
    #[arg(long, short)]
    pub(crate) detach: bool,
    /// Append the output of a detached command to this file; without this option, the output is lost.
    #[arg(long, value_name = "FILE", requires = "detach")]
    pub(crate) log: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// Whether plugins may wait.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct WaitArgs {
    /// Fail at once where a plugin would wait, for example for an address in quarantine (wharf-cni waits for up to 60
    /// s; other plugins may ignore this).
    #[arg(long)]
    pub(crate) no_wait: bool,
}

/// `wharf sandbox exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// The sandbox.
    pub(crate) name: SandboxName,
    /// Pass standard input to the command.
    #[arg(long, short = 'i')]
    pub(crate) stdin: bool,
    /// Give the command a terminal.
    #[arg(long, short = 't')]
    pub(crate) tty: bool,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

/// How long processes may take.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct GraceArgs {
    /// Time between SIGTERM and SIGKILL.
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "10s")]
    pub(crate) grace: Duration,
}
