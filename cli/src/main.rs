//! `wharf`, the operator's tool. All of it is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf::main()
}
