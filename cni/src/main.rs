//! The CNI plugin `wharf-cni`.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_cni::run()
}
