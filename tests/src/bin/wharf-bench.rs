//! What Wharf costs, side by side with other ways to connect containers. See `wharf_tests::bench`.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::Parser;
use wharf_tests::bench::{self, Options, PARTS, ends, table};

/// Measures Wharf side by side with Debian's ptp and bridge plugins, a direct veth pair, routing and a Linux bridge.
///
/// Everything happens in network namespaces that end with it. A bad number is no failure: the marks at the end say what
/// is wanted and what was measured. The agent's files are on a tmpfs, as under /run; WHARF_SCRATCH=DIR puts them on the
/// disk of DIR, where they stay.
#[derive(Debug, Parser)]
#[command(name = "wharf-bench")]
struct Cli {
    /// A smoke run of under two minutes, to see that it works; its numbers mean little.
    #[arg(long)]
    quick: bool,
    /// Measure only this part; may be repeated.
    #[arg(long, value_name = "PART", value_parser = clap::builder::PossibleValuesParser::new(PARTS))]
    only: Vec<String>,
    /// Rounds of every part, instead of each part's own number.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    rounds: Option<u16>,
    /// A flag for the agent, which else runs as it does by default; may be repeated.
    #[arg(long, value_name = "FLAG", allow_hyphen_values = true)]
    agent_flag: Vec<String>,
    /// Be the answering end of a conversation (the bench starts itself so).
    #[arg(long, value_name = "KIND:CPU", hide = true)]
    answer: Option<String>,
    /// Where the results go [default: target/bench].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("wharf-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    if let Some(spec) = &cli.answer {
        return ends::answer(spec);
    }
    let options = Options {
        quick: cli.quick,
        only: cli.only.clone(),
        rounds: cli.rounds.map(usize::from),
        agent_flags: cli.agent_flag.clone(),
    };
    let findings = bench::measure(&options, |part| eprintln!("measuring: {part}"))?;
    println!("{}", table::render(&findings));
    for warning in findings.machine.warnings() {
        println!("note: {warning}");
    }
    let directory = cli.out.clone().unwrap_or_else(|| bench::target_dir().join("bench"));
    let files = bench::save(&findings, &directory).context("save the results")?;
    let names: Vec<String> = files.iter().map(|f| f.display().to_string()).collect();
    println!("{:.0} s; {}", findings.seconds, names.join(", "));
    Ok(())
}
