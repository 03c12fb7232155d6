//! `wharf`, the operator's CLI. The code is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    wharf::main()
}
