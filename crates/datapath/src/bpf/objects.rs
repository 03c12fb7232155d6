//! The embedded BPF objects: a binary and its programs always have the same version.

include!(concat!(env!("OUT_DIR"), "/objects.rs"));
