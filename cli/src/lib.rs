//! `wharf`: CLI of a Wharf node.
//!
//! `args` parses arguments, `commands` sends requests to the agent, `render` turns answers into text. `debuginfo`,
//! `policy validate`, `policy import` and `candidates` also read files; `sandbox` does not use the agent.
#![forbid(unsafe_code)]

mod args;
mod commands;
mod error;
mod expected;
mod namespace;
mod output;
mod render;
mod selector;
mod target;

use std::{
    ffi::OsString,
    io::{self, Write},
    process::ExitCode,
};

use clap::Parser;

use crate::{
    args::{Cli, Internal},
    error::{CliError, Exit},
};

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let exit = if Internal::is_named_by(&arguments) {
        Internal::try_parse_from(arguments).map(|internal| run(commands::internal(internal)))
    } else {
        Cli::try_parse_from(arguments).map(|cli| run(commands::run(cli)))
    };
    exit.unwrap_or_else(|error| {
        // Help and version; fails on a closed output.
        let _ = error.print();
        if error.use_stderr() { Exit::Usage } else { Exit::Ok }
    })
    .into()
}

fn run(command: impl Future<Output = Result<Exit, CliError>>) -> Exit {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(command),
        Err(e) => Err(CliError::refused(format!("starting: {e}"))),
    };
    match result {
        Ok(exit) => exit,
        Err(error) => {
            if !error.is_silent() {
                let _ = writeln!(io::stderr(), "{error}");
            }
            error.exit
        }
    }
}
