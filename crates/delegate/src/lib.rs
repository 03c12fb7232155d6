//! The gRPC interface of delegated mode: the agent forwards the runtime's commands to the service at `--delegate`,
//! which makes the containers' network. `proto/wharf/delegate/v1/delegate.proto` has the contract;
//! `WHARF_UPDATE_PROTO=1 cargo test -p wharf-delegate` generates the code.

#[allow(
    unreachable_pub,
    clippy::all,
    clippy::cast_possible_truncation,
    reason = "generated; the interface's comments are those of the .proto"
)]
pub mod v1 {
    include!("generated/wharf.delegate.v1.rs");
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used, reason = "a test fails by panicking")]

    use std::{fs, path::Path};

    #[test]
    fn the_checked_in_code_is_that_of_the_interface() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let proto = root.join("proto/wharf/delegate/v1/delegate.proto");
        let descriptors = protox::compile([&proto], [root.join("proto")]).expect("the interface compiles");
        let made = std::env::temp_dir().join(format!("wharf-delegate-proto-{}", std::process::id()));
        fs::create_dir_all(&made).expect("make a directory");
        tonic_prost_build::configure()
            .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
            .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
            .out_dir(&made)
            .compile_fds(descriptors)
            .expect("code is made");
        let name = "wharf.delegate.v1.rs";
        let code = fs::read_to_string(made.join(name)).expect("the code");
        fs::remove_dir_all(&made).expect("remove the directory");
        let kept = root.join("src/generated").join(name);
        if std::env::var_os("WHARF_UPDATE_PROTO").is_some() {
            fs::write(&kept, &code).expect("write the code");
        }
        assert!(
            fs::read_to_string(&kept).expect("the code that is checked in") == code,
            "{} is stale: run `WHARF_UPDATE_PROTO=1 cargo test -p wharf-delegate` and review the difference",
            kept.display()
        );
    }
}
