//! gRPC interface of the cluster feed: a producer reports nodes, pods, namespaces and policies to the agent.
//! `WHARF_UPDATE_PROTO=1 cargo test -p wharf-feed` generates the code from `proto/`.

#[cfg(any(feature = "client", feature = "server"))]
mod codec;

use prost::Message as _;

#[cfg(any(feature = "client", feature = "server"))]
pub use codec::MAX_CHANGES;

#[allow(
    unreachable_pub,
    clippy::all,
    clippy::cast_possible_truncation,
    reason = "generated; the interface's comments are those of the .proto"
)]
pub mod v1 {
    include!("generated/wharf.feed.v1.rs");
}

/// File name of the socket in the directory of `--cluster-feed`.
pub const SOCKET: &str = "feed.sock";
/// Maximum bytes of a producer's message.
pub const MAX_MESSAGE: usize = 4 << 20;
/// Maximum bytes of a row.
pub const MAX_ROW: usize = 3 << 19;

impl v1::Row {
    /// Encoded size, bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.encoded_len()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::expect_used, reason = "a test fails by panicking")]

    use std::{fs, path::Path};

    #[test]
    fn the_checked_in_code_is_that_of_the_interface() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let proto = root.join("proto/wharf/feed/v1/feed.proto");
        let descriptors = protox::compile([&proto], [root.join("proto")]).expect("the interface compiles");
        let made = std::env::temp_dir().join(format!("wharf-feed-proto-{}", std::process::id()));
        fs::create_dir_all(&made).expect("make a directory");
        tonic_prost_build::configure()
            .btree_map(".")
            .client_mod_attribute(".", "#[cfg(feature = \"client\")]")
            .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
            .out_dir(&made)
            .compile_fds(descriptors)
            .expect("code is made");
        let name = "wharf.feed.v1.rs";
        let code = fs::read_to_string(made.join(name)).expect("the code");
        // For a file, the generator has no codec setting.
        let code = code.replace("tonic_prost::ProstCodec::default()", "crate::codec::Codec::default()");
        fs::remove_dir_all(&made).expect("remove the directory");
        let kept = root.join("src/generated").join(name);
        if std::env::var_os("WHARF_UPDATE_PROTO").is_some() {
            fs::write(&kept, &code).expect("write the code");
        }
        assert!(
            fs::read_to_string(&kept).expect("the code that is checked in") == code,
            "{} is stale: run `WHARF_UPDATE_PROTO=1 cargo test -p wharf-feed` and review the difference",
            kept.display()
        );
    }
}
