//! `wharf-cni-crash`: the plugin with its crash points armed, only for the crash tests.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf_cni::run()
}
