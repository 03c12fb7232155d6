//! The programs on an interface, asked of the kernel and not of the agent.

use anyhow::{Context, Result};
use aya::programs::{SchedClassifier, tc::TcAttachType};

use crate::space::Space;

/// Kernel ids of the tcx programs on an interface, ingress first. Each load of a program gives it a new id.
///
/// # Errors
/// When there is no such interface, or the kernel has no tcx.
pub fn attached(space: &Space, ifname: &str) -> Result<[Vec<u32>; 2]> {
    let query = |direction| {
        let (_, programs) = SchedClassifier::query_tcx(ifname, direction)
            .with_context(|| format!("ask which programs are on {ifname}"))?;
        anyhow::Ok(programs.iter().map(aya::programs::ProgramInfo::id).collect())
    };
    space.run(|| Ok([query(TcAttachType::Ingress)?, query(TcAttachType::Egress)?]))?
}
