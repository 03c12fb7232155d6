//! Commands: send requests to the agent and render answers.

mod audit;
mod bpf;
mod candidates;
mod cluster;
mod config;
mod debuginfo;
mod describe;
mod endpoint;
mod explain;
mod health;
mod manual;
mod monitor;
mod namespace;
mod pages;
mod policy;
mod proxy;
mod repeat;
mod sandbox;
mod status;
mod watch;

use std::{path::Path, time::Duration};

use serde::{Serialize, Serializer};
use wharf_api::{Endpoint, EndpointFilter, client::Client};

use self::repeat::Answer;
use crate::{
    args::{Cli, Command, Internal, InternalCommand, IpamCommand, PolicyCommand, PortCommand},
    error::{CliError, Exit},
    output::{Output, remark},
    render::{self, port::Port},
};

/// Allows for a build, a repair, or a delete that waits for the proxy.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Probes treat slower agents as unhealthy.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Delay before reporting the current wait.
const QUIET: Duration = Duration::from_secs(2);

struct Context {
    client: Client,
    out: Output,
}

impl Context {
    fn new(socket: &Path, out: Output) -> Self {
        Self { client: Client::new(socket).with_timeout(TIMEOUT), out }
    }
}

/// Reports the wait on standard error after [`QUIET`].
pub(crate) async fn run(cli: Cli) -> Result<Exit, CliError> {
    // Commands without a time limit or with own reports.
    let is_long = match &cli.command {
        Command::Status(_) | Command::Monitor(_) | Command::Debuginfo(_) | Command::Bpf(_) | Command::Sandbox(_) => {
            true
        }
        Command::Policy(command) => matches!(command, PolicyCommand::Wait { .. }),
        command => command.watches(),
    };
    let waiting = format!("wharf: waiting for the agent at {}", cli.global.socket.display());
    let work = answer(cli);
    tokio::pin!(work);
    if !is_long {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = tokio::time::sleep(QUIET) => remark(&waiting),
        }
    }
    work.await
}

pub(crate) async fn internal(Internal { global, command }: Internal) -> Result<Exit, CliError> {
    match command {
        InternalCommand::Candidates { words } => {
            let cx = Context::new(&global.socket, Output::new(global.output, global.color));
            candidates::run(&cx, &words).await
        }
        InternalCommand::Man { dir } => manual::man(&dir),
    }
}

struct Published(Vec<Endpoint>);

impl Published {
    fn of(&self) -> Vec<Port<'_>> {
        render::port::of(&self.0)
    }
}

impl Serialize for Published {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.of().serialize(serializer)
    }
}

async fn answer(cli: Cli) -> Result<Exit, CliError> {
    let out = Output::new(cli.global.output, cli.global.color);
    let cx = Context::new(&cli.global.socket, out);
    match cli.command {
        Command::Status(args) => status::run(&cx, &args).await,
        Command::Endpoint(command) => endpoint::run(&cx, command).await,
        Command::Health(command) => health::run(&cx, &command).await,
        Command::Cluster(command) => cluster::run(&cx, &command).await,
        Command::Ipam(IpamCommand::List(follow)) => {
            let ask = async || Ok(Answer::plain(cx.client.ipam().await?));
            repeat::show(&cx, follow.watch, ask, render::ipam::list).await?;
            Ok(Exit::Ok)
        }
        Command::Ipam(IpamCommand::Release { address }) => {
            cx.client.release_ip(address).await?;
            let done = std::collections::BTreeMap::from([("released", address)]);
            cx.out.emit(&done, |_| format!("{address} is not held any more\n"))?;
            Ok(Exit::Ok)
        }
        Command::Port(PortCommand::List { choice, follow }) => {
            let ask = async || {
                let mut endpoints = cx.client.endpoints(&EndpointFilter::default()).await?;
                endpoints.retain(|e| choice.has(e));
                Ok(Answer::plain(Published(endpoints)))
            };
            repeat::show(&cx, follow.watch, ask, |ports, style| render::port::list(&ports.of(), style)).await?;
            Ok(Exit::Ok)
        }
        Command::Policy(command) => policy::run(&cx, command).await,
        Command::Proxy(command) => proxy::run(&cx, &command).await,
        Command::Namespace(command) => namespace::run(&cx, command).await,
        Command::Bpf(command) => bpf::run(&cx, command).await,
        Command::Sandbox(args) => sandbox::run(&cx.out, args).await,
        Command::Monitor(args) => monitor::run(&cx, args.filter, args.count, args.time).await,
        Command::Audit(args) => audit::run(&cx, &args).await,
        Command::Explain(args) => explain::run(&cx, &args).await,
        Command::Debuginfo(args) => debuginfo::run(&cx, &args).await,
        Command::Config(command) => config::run(&cx, command).await,
        Command::Completion { shell } => pages::completion(shell),
        Command::Version { client } => status::version(&cx, client).await,
    }
}
