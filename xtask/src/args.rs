//! The command line; `--help` is the manual.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Builds, tests, shows and installs Wharf.
///
/// Each command first installs and builds what it needs: missing Debian packages, the sources of Rust's core library,
/// the BPF linker, Wharf. A second run starts at once. Run it as root, or as a user with sudo: the user builds, and
/// sudo is used only for packages, network namespaces and installation.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    version,
    after_help = "Start here:\n  cargo xtask demo      see containers connected, on real traffic, in namespaces of their own\n  \
                  cargo xtask test      every test; what continuous integration runs\n\nThen:\n  cargo xtask run       serve this machine in the foreground\n  \
                  cargo xtask install   put binaries, CNI network and systemd unit in place"
)]
pub(crate) struct Cli {
    /// Show the output of every child command, not only of one that fails.
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,

    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Task,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Task {
    /// Prepare the BPF toolchain under target/ebpf-toolchain (about 100 s, once), and Envoy under target/envoy
    Setup(SetupArgs),
    /// Build target/bpf/*.o and target/release/{wharf-agent,wharf-cni,wharf}
    Build,
    /// Show the main functions in a separate network namespace: attach, talk, regenerate, delete
    Demo(Passed),
    /// Run every check and every test
    ///
    /// Quick checks come first (formatting, licences, documentation links), then the build, clippy and the tests. With
    /// FILTERS only the tests whose names contain one of them run, and no checks.
    Test(TestArgs),
    /// Run churn with kills, crash tests and the model at random for a given time; the first failure ends the run
    Soak(SoakArgs),
    /// Run the kernel's tests on other kernels: Debian's 6.1, 6.12 and 7.2, in virtual machines
    ///
    /// Needs no root, no /dev/kvm, and installs nothing: QEMU and the kernels are unpacked under target/vm.
    Vm(VmArgs),
    /// Run a Kubernetes cluster in namespaces of this machine, with Wharf as its manifest runs it, and check it
    ///
    /// Needs root and the programs of a Kubernetes release. The cluster ends with the command, also on Ctrl-C.
    Kubernetes(KubernetesArgs),
    /// Send datagrams in the network namespace of a pod, for the latencies of `kubernetes`
    #[command(hide = true)]
    KubernetesProbe(ProbeArgs),
    /// Answer DNS queries about services, for `kubernetes --e2e`
    #[command(hide = true)]
    KubernetesDns(DnsArgs),
    /// Measure against other CNI plugins, side by side; tables and plots under target/bench
    Bench(Passed),
    /// Serve this machine: build, then run wharf-agent in the foreground
    ///
    /// The agent gets the arguments unchanged, e.g. `cargo xtask run -- --ipv4-pool 10.88.0.0/16`. The settings of
    /// /etc/wharf/agent.toml apply where that file exists and no argument is `--config`. Stop the agent with Ctrl-C.
    Run(Passed),
    /// Install binaries, CNI network, configuration, manual pages and systemd unit
    Install(InstallArgs),
    /// Remove the files that `install` wrote, and what the agent left on the node (`wharf-agent cleanup`)
    ///
    /// Refuses while endpoints live: without the plugin, the runtime cannot delete them.
    Uninstall(UninstallArgs),
    /// Build the documentation as a book with search, under target/docs
    ///
    /// The first run installs mdBook under target/mdbook.
    Docs,
    /// Make the packages under target/dist: .deb, static tarball, container image, Kubernetes manifests, SBOM,
    /// checksums
    ///
    /// The same commit and toolchain give the same bytes: times are that of the commit, or SOURCE_DATE_EPOCH.
    #[command(after_help = "\
Examples:
  cargo xtask dist                                    build, then make all of them
  apt-get install ./target/dist/wharf_*_amd64.deb     Debian, Ubuntu
  podman load --input target/dist/wharf-*.oci.tar     the image of the DaemonSet
  (cd target/dist && sha256sum --check SHA256SUMS)    what was downloaded is what was made")]
    Dist(DistArgs),
    /// Fuzz the parsers of input from outside
    ///
    /// `cargo xtask test` replays and mutates the checked-in inputs. This command searches for new inputs, guided by
    /// coverage, and continues from earlier results in target/fuzz.
    Fuzz(FuzzArgs),
    /// Compare the REST API with its OpenAPI document (schemathesis)
    ///
    /// `cargo xtask test` does the same with the defaults. Schemathesis is installed with pip under
    /// target/schemathesis.
    Schemathesis(SchemathesisArgs),
    /// Format the sources
    Fmt(FmtArgs),
    /// Check formatting, licences, documentation links and clippy
    Lint,
}

/// Arguments of `setup`.
#[derive(Debug, Args)]
pub(crate) struct SetupArgs {
    /// Where core's sources come from.
    #[arg(long, value_enum, default_value_t = CoreSources::Auto)]
    pub(crate) core_sources: CoreSources,
}

/// Ways to the sources of Rust's core library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CoreSources {
    /// The toolchain's own, else rustup's component, else Debian's package.
    Auto,
    /// Debian's package, even if the toolchain has the sources.
    Debian,
}

/// Arguments for the program that a command starts.
#[derive(Debug, Args)]
pub(crate) struct Passed {
    /// Passed unchanged.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<String>,
}

/// Arguments of `test`.
#[derive(Debug, Args)]
pub(crate) struct TestArgs {
    /// Continue with the tests after a failed check.
    #[arg(long)]
    pub(crate) keep_going: bool,
    /// Kill Wharf at all crash points: half an hour more. Without this flag, a run of all tests takes a 24th of them,
    /// which the commit chooses.
    #[arg(long)]
    pub(crate) all_points: bool,
    /// Run only tests whose names contain one of these, at all crash points of those tests.
    pub(crate) filters: Vec<String>,
}

/// Arguments of `soak`.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Duration after the build. Each part gets a share, and at least one run of about a minute.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) minutes: u64,
    /// Start every part with this seed, to repeat a failed run.
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
}

/// Arguments of `vm`.
#[derive(Debug, Args)]
pub(crate) struct VmArgs {
    /// Run on this kernel; may be repeated [default: 6.1, 6.12 and 7.2].
    #[arg(long = "kernel", value_enum, value_name = "VERSION")]
    pub(crate) kernels: Vec<VmKernel>,
    /// Run the tests whose FILE::NAME contains this, `::` for all; may be repeated [default: tests that depend on the
    /// kernel]
    #[arg(long = "test", value_name = "NAME")]
    pub(crate) tests: Vec<String>,
    /// Keep the guests' files in target/vm/work.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Do not build: test the programs in target/release.
    #[arg(long)]
    pub(crate) prebuilt: bool,
}

/// Debian's kernels for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum VmKernel {
    /// bookworm's.
    #[value(name = "6.1")]
    V6_1,
    /// trixie's, from bookworm-backports.
    #[value(name = "6.12")]
    V6_12,
    /// sid's.
    #[value(name = "7.2")]
    V7_2,
    /// sid's, with netkit links.
    #[value(name = "7.2-netkit")]
    V7_2Netkit,
}

impl VmKernel {
    /// Without `--kernel`.
    pub(crate) const DEFAULT: [Self; 4] = [Self::V6_1, Self::V6_12, Self::V7_2, Self::V7_2Netkit];
}

/// Arguments of `kubernetes`.
#[derive(Debug, Args)]
pub(crate) struct KubernetesArgs {
    /// Directory with kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kubectl, kube-proxy and etcd;
    /// with e2e.test and agnhost for `--e2e`.
    #[arg(long, value_name = "DIR")]
    pub(crate) bin_dir: PathBuf,
    /// Number of nodes. The last of several nodes is behind a router, and needs the overlay.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=5))]
    pub(crate) nodes: u8,
    /// Duration of the churn in which programs are killed.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    pub(crate) minutes: u64,
    /// Run checks whose names contain this, and those that they need; may be repeated [default: all]
    #[arg(long = "check", value_name = "NAME")]
    pub(crate) checks: Vec<String>,
    /// Also run the tests of [sig-network] of Kubernetes' e2e.test.
    #[arg(long)]
    pub(crate) e2e: bool,
    /// Keep the cluster after the checks, until Ctrl-C.
    #[arg(long)]
    pub(crate) keep: bool,
    /// Do not build: use the programs in target/release.
    #[arg(long)]
    pub(crate) prebuilt: bool,
}

/// Arguments of `kubernetes-probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Send to this address.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) to: Option<std::net::SocketAddr>,
    /// Without `--to`, answer on this port.
    #[arg(long, value_name = "PORT", default_value_t = 9999)]
    pub(crate) port: u16,
}

/// Arguments of `kubernetes-dns`.
#[derive(Debug, Args)]
pub(crate) struct DnsArgs {
    /// Listen on this address; may be repeated.
    #[arg(long = "address", value_name = "ADDRESS", required = true)]
    pub(crate) addresses: Vec<std::net::IpAddr>,
    /// UDP and TCP port.
    #[arg(long, value_name = "PORT", default_value_t = 53)]
    pub(crate) port: u16,
    /// Command that prints Services and EndpointSlices as a JSON list.
    #[arg(last = true, value_name = "COMMAND", required = true)]
    pub(crate) command: Vec<String>,
}

/// Arguments of `dist`.
#[derive(Debug, Args)]
pub(crate) struct DistArgs {
    /// Do not build: pack the programs in target/release.
    #[arg(long)]
    pub(crate) prebuilt: bool,
}

/// Arguments of `fuzz`.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// Targets, by their names in fuzz/fuzz_targets [default: all].
    #[arg(value_name = "TARGET")]
    pub(crate) targets: Vec<String>,
    /// How long each target runs.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seconds: u32,
    /// Run this input, for example one that failed.
    #[arg(long, value_name = "FILE")]
    pub(crate) input: Option<PathBuf>,
}

/// Arguments of `schemathesis`.
#[derive(Debug, Args)]
pub(crate) struct SchemathesisArgs {
    /// Examples of each operation in each phase.
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) examples: u32,
    /// Seed of the random examples.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Arguments of `fmt`.
#[derive(Debug, Args)]
pub(crate) struct FmtArgs {
    /// Change nothing; fail if a file is not formatted.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Directories of an installation, for `install` and `uninstall`.
#[derive(Debug, Clone, Args)]
pub(crate) struct Layout {
    /// Put everything under this directory, as if it were `/` (for packages; touches nothing else).
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,
    /// Directory for programs and manual pages.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    pub(crate) prefix: PathBuf,
}

/// Arguments of `install`.
#[derive(Debug, Clone, Args)]
pub(crate) struct InstallArgs {
    /// Directories.
    #[command(flatten)]
    pub(crate) layout: Layout,
    /// The container runtime's directory of CNI plugins (Debian's podman: /usr/lib/cni).
    #[arg(long, value_name = "DIR", default_value = "/opt/cni/bin")]
    pub(crate) cni_bin_dir: PathBuf,
    /// The container runtime's directory of CNI networks.
    #[arg(long, value_name = "DIR", default_value = "/etc/cni/net.d")]
    pub(crate) cni_conf_dir: PathBuf,
    /// systemd's directory of units.
    #[arg(long, value_name = "DIR", default_value = "/etc/systemd/system")]
    pub(crate) unit_dir: PathBuf,
    /// Start the service now and at every boot.
    #[arg(long, conflicts_with = "root")]
    pub(crate) now: bool,
    /// Do not build: install the programs in target/release.
    #[arg(long)]
    pub(crate) prebuilt: bool,
    /// List the files that would be written, and change nothing: no build, no package, no root.
    #[arg(long, conflicts_with = "now")]
    pub(crate) dry_run: bool,
}

/// Arguments of `uninstall`.
#[derive(Debug, Clone, Args)]
pub(crate) struct UninstallArgs {
    /// Directories.
    #[command(flatten)]
    pub(crate) layout: Layout,
    /// Also remove configuration that was edited, and the agent's saved state.
    #[arg(long)]
    pub(crate) purge: bool,
    /// Stop and disable the service first.
    #[arg(long, conflicts_with = "root")]
    pub(crate) now: bool,
    /// Also while endpoints live; their containers lose the network.
    #[arg(long, conflicts_with = "root")]
    pub(crate) force: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_of_the_agent_pass_through_run() {
        let cli = Cli::try_parse_from(["xtask", "run", "--run-dir", "/tmp/x", "-h"]).map(|cli| cli.command);
        assert!(matches!(cli, Ok(Task::Run(passed)) if passed.args == ["--run-dir", "/tmp/x", "-h"]));
    }
}
