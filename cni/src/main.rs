//! The CNI plugin `wharf-cni`; its code is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_cni::run()
}
