//! Finds the BPF objects for `bpf/objects.rs` to embed: in `target/bpf`, where `cargo xtask build` puts them, or in
//! `WHARF_BPF_DIR`.

use std::{env, error::Error, fs, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=WHARF_BPF_DIR");
    let dir = match env::var_os("WHARF_BPF_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../target/bpf"),
    };
    let dir = dir.canonicalize().unwrap_or(dir);
    let mut code = String::new();
    for (name, constant) in
        [("endpoint.o", "ENDPOINT"), ("node.o", "NODE"), ("overlay.o", "OVERLAY"), ("sink.o", "SINK")]
    {
        let path = dir.join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        if path.is_file() {
            code += &format!("static {constant}: &[u8] = aya::include_bytes_aligned!({path:?});\n");
        } else {
            println!("cargo::error=BPF object {} is missing; run `cargo xtask build`", path.display());
        }
    }
    let debug = dir.join("endpoint-debug.o");
    if debug.is_file() {
        println!("cargo::rerun-if-changed={}", debug.display());
        code += &format!("static ENDPOINT_DEBUG: Option<&[u8]> = Some(aya::include_bytes_aligned!({debug:?}));\n");
    } else {
        // Cargo would treat a missing file as changed, in each build.
        code += "static ENDPOINT_DEBUG: Option<&[u8]> = None;\n";
    }
    fs::write(PathBuf::from(env::var("OUT_DIR")?).join("objects.rs"), code)?;
    Ok(())
}
