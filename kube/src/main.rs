//! `wharf-kube`, the producer of the cluster feed for Kubernetes.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf_kube::main()
}
