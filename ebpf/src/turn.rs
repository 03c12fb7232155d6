//! Turns a packet from the stack to a container back to the proxy: it enters the stack again through the router's link,
//! and its mark makes the stack deliver it locally.
//!
//! The router's link (row 0 of `PROFILES`) has no programs and accepts any source (`wharf_datapath::redirects`); other
//! links would run endpoint programs again.

use aya_ebpf::{bindings::BPF_F_INGRESS, helpers::bpf_redirect, programs::TcContext};
use wharf_common::{DropReason, policy::MARK_TURNED};

use crate::{parse, profile::Profile};

/// Returns the hook's return value. Errors: `ProxyUnavailable` without a router link, `NoConfig`, `Malformed`.
#[inline(always)]
pub fn turn(ctx: &TcContext) -> Result<i32, DropReason> {
    let node = Profile::of(0).ok_or(DropReason::NoConfig)?;
    let ifindex = node.ifindex();
    if ifindex == 0 {
        return Err(DropReason::ProxyUnavailable);
    }
    // The kernel accepts only frames to the link's MAC.
    parse::ethernet(ctx)?.set_destination(node.host_mac());
    // SAFETY: the context; a classifier may write the field.
    unsafe { (*ctx.skb.skb).mark |= MARK_TURNED };
    // SAFETY: a helper without pointers.
    Ok(unsafe { bpf_redirect(ifindex, BPF_F_INGRESS.into()) } as i32)
}
