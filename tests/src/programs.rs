//! The programs on an interface, asked of the kernel and not of the agent.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use aya::programs::{SchedClassifier, tc::TcAttachType};
use serde_json::Value;

use crate::space::Space;

/// The context of a test run (`struct __sk_buff` of linux/bpf.h, up to its member `ifindex`) whose packet is on an
/// interface of the caller's network namespace. Without one the kernel takes the loopback interface, by which Wharf's
/// programs recognise the self-check's packets, which they do not count.
#[must_use]
pub fn on_interface(ifindex: u32) -> [u8; 44] {
    let mut context = [0; 44];
    if let Some(place) = context.last_chunk_mut() {
        *place = ifindex.to_ne_bytes();
    }
    context
}

/// Kernel ids of the programs on an interface's hooks, ingress first: those in its tcx chain, then those of its clsact
/// filters (as `tc` shows them). Each load of a program gives it a new id.
///
/// # Errors
/// When there is no such interface, or `tc` (package iproute2) cannot be run.
pub fn attached(space: &Space, ifname: &str) -> Result<[Vec<u32>; 2]> {
    let both = |direction, word| {
        let mut ids = tcx(ifname, direction)?;
        ids.extend(clsact(ifname, word)?);
        anyhow::Ok(ids)
    };
    space.run(|| Ok([both(TcAttachType::Ingress, "ingress")?, both(TcAttachType::Egress, "egress")?]))?
}

/// None where the kernel has no tcx: it then does not know the question.
fn tcx(ifname: &str, direction: TcAttachType) -> Result<Vec<u32>> {
    if SchedClassifier::query_tcx("lo", direction).is_err() {
        return Ok(Vec::new());
    }
    let (_, programs) = SchedClassifier::query_tcx(ifname, direction)
        .with_context(|| format!("ask which programs are in the tcx chain of {ifname}"))?;
    Ok(programs.iter().map(aya::programs::ProgramInfo::id).collect())
}

fn clsact(ifname: &str, direction: &str) -> Result<Vec<u32>> {
    let output = Command::new("tc")
        .args(["-j", "filter", "show", "dev", ifname, direction])
        .output()
        .context("run tc (package iproute2)")?;
    ensure!(output.status.success(), "tc filter show dev {ifname}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let filters: Vec<Value> = serde_json::from_str(&text).with_context(|| format!("read tc's answer {text}"))?;
    let id =
        |filter: &Value| filter.pointer("/options/prog/id").and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    Ok(filters.iter().filter_map(id).collect())
}

/// Takes the filters of a direction (`ingress`, `egress`) off an interface, as somebody at a shell would.
///
/// # Errors
/// When `tc` refuses.
pub fn take_off(space: &Space, ifname: &str, direction: &str) -> Result<()> {
    let output = space
        .run(|| Command::new("tc").args(["filter", "del", "dev", ifname, direction]).output())?
        .context("run tc (package iproute2)")?;
    ensure!(
        output.status.success(),
        "tc filter del dev {ifname} {direction}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
