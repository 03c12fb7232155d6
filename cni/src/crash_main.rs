//! `wharf-cni` with its crash points armed, for the crash tests.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf_cni::run()
}
