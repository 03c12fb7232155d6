//! `wharf-cni`, the CNI plugin. All of it is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_cni::run()
}
