//! `wharf-crash`: the tool with its crash points armed, for the crash tests alone.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf::main()
}
