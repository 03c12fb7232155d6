//! `wharf-agent`.

fn main() -> std::process::ExitCode {
    wharf_agent::process::main()
}
