//! A real client: containerd runs pods on a Wharf network, driven over its CRI as a kubelet does.

mod killed;
mod pods;
mod support;
