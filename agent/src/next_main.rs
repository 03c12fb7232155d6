//! `wharf-agent-next`: the agent of the next ABI version, with its crash points armed, for the upgrade tests alone.

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf_agent::process::main()
}
