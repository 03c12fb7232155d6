//! `wharf-cni-crash`: the plugin with its crash points armed, for the crash tests alone.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_crash::arm();
    wharf_cni::run()
}
