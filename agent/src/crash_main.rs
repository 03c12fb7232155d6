//! The agent with armed crash points, and with objects of the next ABI version from `WHARF_NEXT_ABI`.

use std::{path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    wharf_crash::arm();
    if let Some(objects) = std::env::var_os("WHARF_NEXT_ABI").map(PathBuf::from)
        && let Err(error) = wharf_datapath::use_next_abi(&objects)
    {
        eprintln!("wharf-agent-crash: read the objects of the next ABI version in {}: {error}", objects.display());
        return ExitCode::FAILURE;
    }
    wharf_agent::process::main()
}
