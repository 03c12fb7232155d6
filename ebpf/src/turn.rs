//! Turns a packet from the stack to a container back to the proxy: it enters the stack again through the router's
//! link, and its mark makes the stack deliver it locally.
//!
//! Row 0 of `PROFILES`, which is no endpoint's, has the router's link. It has no programs, and the kernel accepts any
//! source there (`wharf_datapath::redirects`). The packet's outgoing link has the container's programs, and its
//! incoming link would run other programs again.

use aya_ebpf::{bindings::BPF_F_INGRESS, helpers::bpf_redirect, programs::TcContext};
use wharf_common::{DropReason, policy::MARK_TURNED};

use crate::{parse, profile::Profile};

/// Returns the hook's return value.
///
/// # Errors
/// `ProxyUnavailable` without a router link, `NoConfig`, `Malformed`.
#[inline(always)]
pub fn turn(ctx: &TcContext) -> Result<i32, DropReason> {
    let node = Profile::of(0).ok_or(DropReason::NoConfig)?;
    let ifindex = node.ifindex();
    if ifindex == 0 {
        return Err(DropReason::ProxyUnavailable);
    }
    // The kernel accepts only frames to the link's MAC.
    parse::ethernet(ctx)?.set_destination(node.host_mac());
    // SAFETY: the program's context; a classifier may write the field.
    unsafe { (*ctx.skb.skb).mark |= MARK_TURNED };
    // SAFETY: a helper without pointers; `TC_ACT_REDIRECT`, or `TC_ACT_SHOT` for unknown flags.
    Ok(unsafe { bpf_redirect(ifindex, BPF_F_INGRESS.into()) } as i32)
}
