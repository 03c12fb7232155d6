//! The BPF objects, embedded: a binary and its programs are one version, always.

include!(concat!(env!("OUT_DIR"), "/objects.rs"));
