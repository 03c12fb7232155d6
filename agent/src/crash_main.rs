//! `wharf-agent-crash`: the agent with its crash points armed, for the crash tests alone.

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf_agent::process::main()
}
