//! `wharf`, the CLI.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf::main()
}
