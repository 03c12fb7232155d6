//! The REST API against its OpenAPI document, by schemathesis (<https://schemathesis.readthedocs.io>).
//!
//! An agent serves a node of its own, with endpoints in it; schemathesis runs inside the same network namespace and
//! speaks TCP, so a bridge on the namespace's loopback carries its bytes to the agent's unix socket. Nothing leaves the
//! namespace. The exit status says whether every answer was as the document says, and none a fault of the agent's;
//! after it the agent must still be the same process, serve, and leave nothing.

use std::{
    io,
    net::{Shutdown, TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use wharf_api::{EndpointFilter, ErrorCode};
use wharf_tests::{Node, NodeConfig, process::run, scenario};

/// Longest that schemathesis may take: it ends by itself, after its examples; this is for one that hangs.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs schemathesis against an agent in a network namespace of its own.
#[derive(Debug, Parser)]
struct Arguments {
    /// The program `st` of an installed schemathesis.
    #[arg(long, value_name = "FILE")]
    st: PathBuf,
    /// Its configuration.
    #[arg(long, value_name = "FILE", default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/schemathesis.toml"))]
    config: PathBuf,
    /// Examples of each operation in each phase.
    #[arg(long, value_name = "N", default_value_t = 50)]
    examples: u32,
    /// Seed of what is random in them.
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

fn main() -> ExitCode {
    match scenario(NodeConfig::default(), |node| test(node, &Arguments::parse())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wharf-schemathesis: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn test(node: &mut Node, arguments: &Arguments) -> Result<()> {
    let pid = node.agent_pid()?;
    let sandboxes = ["a", "b"].map(|name| node.sandbox(name)).into_iter().collect::<Result<Vec<_>>>()?;
    for sandbox in &sandboxes {
        node.attach(sandbox)?;
    }
    let address = bridge(node)?;
    let mut command = node.command(&arguments.st)?;
    prepare(&mut command, node.dirs().root.as_path(), arguments, &address);
    let begun = Instant::now();
    let finished = run(command, b"", LIMIT)?;
    println!("{}", finished.stdout);
    if !finished.status.success() {
        bail!("schemathesis ended with {} after {:?}\n{}", finished.status, begun.elapsed(), finished.stderr);
    }
    ensure!(node.agent_pid()? == pid, "the agent is another process than before");
    let status = node.ask(async |c| c.status().await)?;
    ensure!(status.serving && status.pid == pid, "after it the agent does not serve: {:?}", status.components);
    clean(node)?;
    println!("every answer was as the document says; the agent serves on and leaves nothing ({:?})", begun.elapsed());
    Ok(())
}

/// The command line, and an environment in which nothing is written but below `root`.
fn prepare(command: &mut Command, root: &Path, arguments: &Arguments, address: &str) {
    command
        .current_dir(root)
        .env("HOME", root)
        .env("NO_COLOR", "1")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env_remove("http_proxy")
        .env_remove("HTTP_PROXY")
        .env_remove("https_proxy")
        .env_remove("HTTPS_PROXY")
        .env_remove("all_proxy")
        .env_remove("ALL_PROXY")
        .arg("--config-file")
        .arg(&arguments.config)
        .args(["run", "--no-color", "--workers", "1", "--continue-on-failure"])
        .args(["--generation-database", "none", "--request-timeout", "60"])
        .args(["--seed", &arguments.seed.to_string(), "--max-examples", &arguments.examples.to_string()])
        .arg(format!("http://{address}/v1/openapi.json"));
}

/// Carries connections from a port of the node's loopback to the agent's socket. Gives the port's address.
fn bridge(node: &Node) -> Result<String> {
    let listener =
        node.space().run(|| TcpListener::bind("127.0.0.1:0"))?.context("listen on the node's loopback interface")?;
    let address = listener.local_addr().context("the bridge's address")?.to_string();
    let socket = node.dirs().socket();
    // It ends with this process: there is nothing to hand back, and nobody to wait for it.
    thread::spawn(move || {
        for client in listener.incoming() {
            let carried = client.and_then(|client| carry(client, UnixStream::connect(&socket)?));
            if let Err(error) = carried {
                eprintln!("bridge: {error}");
            }
        }
    });
    Ok(address)
}

fn carry(client: TcpStream, agent: UnixStream) -> io::Result<()> {
    let (mut from_client, mut to_client) = (client.try_clone()?, client);
    let (mut from_agent, mut to_agent) = (agent.try_clone()?, agent);
    // Whichever side ends first tells the other by its shutdown; a connection that is gone is its owner's to notice.
    thread::spawn(move || {
        io::copy(&mut from_client, &mut to_agent).ok();
        to_agent.shutdown(Shutdown::Write).ok();
    });
    thread::spawn(move || {
        io::copy(&mut from_agent, &mut to_client).ok();
        to_client.shutdown(Shutdown::Both).ok();
    });
    Ok(())
}

/// Takes away what is there: endpoints, and addresses that made-up callers leased.
fn clean(node: &Node) -> Result<()> {
    node.ask(async |client| {
        for endpoint in client.endpoints(&EndpointFilter::default()).await? {
            client.delete_endpoint(&endpoint.id.to_string(), &Default::default()).await?;
        }
        for lease in client.ipam().await?.leases {
            match client.release_ip(lease.ip).await {
                // The node's own.
                Err(e) if e.code() == Some(ErrorCode::Exists) => {}
                other => other?,
            }
        }
        Ok(())
    })
}
