//! Turns a packet round that the node's stack sends to a container and that the proxy is to get: the packet comes into the stack again, by
//! the router's link, and is delivered there because of its mark.
//!
//! The row 0 of `PROFILES`, which is no endpoint's, has the router's link. It has programs at none of its hooks, and settings by which the kernel
//! believes any source there (`wharf_datapath::redirects`). The link that the packet was on its way to has the container's programs, and on
//! the link that it came by the kernel would ask others' programs again.

use aya_ebpf::{bindings::BPF_F_INGRESS, helpers::bpf_redirect, programs::TcContext};
use wharf_common::{DropReason, policy::MARK_TURNED};

use crate::{parse, profile::Profile};

/// Turns the packet round. Returns what the hook is to return.
///
/// # Errors
/// `ProxyUnavailable` where the node has no way back, `Malformed`.
#[inline(always)]
pub fn turn(ctx: &TcContext) -> Result<i32, DropReason> {
    let node = Profile::of(0).ok_or(DropReason::NoConfig)?;
    let ifindex = node.ifindex();
    if ifindex == 0 {
        return Err(DropReason::ProxyUnavailable);
    }
    // The kernel takes nothing that is addressed to somebody else.
    parse::ethernet(ctx)?.set_destination(node.host_mac());
    // SAFETY: the context the program was called with, and a field that programs of this kind may write.
    unsafe { (*ctx.skb.skb).mark |= MARK_TURNED };
    // SAFETY: a helper without pointers. It answers `TC_ACT_REDIRECT`, or `TC_ACT_SHOT` for flags it does not know.
    Ok(unsafe { bpf_redirect(ifindex, BPF_F_INGRESS.into()) } as i32)
}
