//! `wharf` with armed crash points.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf::main()
}
