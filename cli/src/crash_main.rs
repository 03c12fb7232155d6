//! `wharf-crash`: the CLI with crash points enabled, only for the crash tests.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf::main()
}
