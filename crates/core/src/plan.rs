//! The steps of create and delete, in order, as data. One executor runs them.
//!
//! A failed create is undone in reverse order ([`plan_undo`]). The executor records each step *before* it runs, so
//! the undo includes a step that failed half-way. A delete is never undone: each step is idempotent, a failure is
//! recorded and the next step runs.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use wharf_handover::DELETE_ANSWER;

use crate::endpoint::{EndpointRecord, IpOwner};

/// A step of a create.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CreateStep {
    /// Store an intent: side effects of this id and epoch may exist.
    WriteIntent,
    /// Lease the addresses (in memory; durable with [`CreateStep::Commit`]).
    Lease,
    /// Load and pin programs and maps, or take a set that was loaded in advance.
    EnsurePrograms,
    /// Create the veth pair, both sides down. Of another plugin's link: see that it is still the one that was looked at.
    EnsureLink,
    /// Write the configuration row, with the endpoint live.
    EnsureConfig,
    /// Attach the programs. No packet can pass without policy from then on, so the link may come up.
    EnsureAttached,
    /// Addresses and routes on both sides, link up. Nothing of another plugin's link is changed.
    EnsureConnected,
    /// Put the rows into the shared maps. Other endpoints can reach the endpoint from then on.
    EnsureReachable,
    /// Endpoint and leases durable and the intent closed, in one transaction.
    Commit,
}

impl CreateStep {
    /// Every step, in order.
    pub const ALL: [Self; 9] = [
        Self::WriteIntent,
        Self::Lease,
        Self::EnsurePrograms,
        Self::EnsureLink,
        Self::EnsureConfig,
        Self::EnsureAttached,
        Self::EnsureConnected,
        Self::EnsureReachable,
        Self::Commit,
    ];

    /// Name in the endpoint's log and metrics' labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::WriteIntent => "write-intent",
            Self::Lease => "lease",
            Self::EnsurePrograms => "ensure-programs",
            Self::EnsureLink => "ensure-link",
            Self::EnsureConfig => "ensure-config",
            Self::EnsureAttached => "ensure-attached",
            Self::EnsureConnected => "ensure-connected",
            Self::EnsureReachable => "ensure-reachable",
            Self::Commit => "commit",
        }
    }

    /// Longest time the step may take, milliseconds. Each deadline is at least a hundred times the usual duration: it
    /// catches a step that hangs, not one that is slow. The sum stays below the 30 s after which runtimes give up.
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            // A flush to a busy disk may take a second.
            Self::WriteIntent | Self::Commit => 3_000,
            // An operation in memory, and up to a second for the checks of resting addresses when no other is free.
            Self::Lease => 1_500,
            // The verifier may run on a machine that is short of CPU time.
            Self::EnsurePrograms => 8_000,
            // RTNL is one lock for the whole kernel: 16 creates and a flood of deletes queue behind it.
            Self::EnsureLink | Self::EnsureConnected => 5_000,
            Self::EnsureConfig | Self::EnsureReachable => 1_000,
            Self::EnsureAttached => 2_000,
        }
    }
}

impl fmt::Display for CreateStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The undo of a create step. Each succeeds when there is nothing to undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UndoStep {
    /// Record and leases out of the store, if the commit got through.
    RemoveRecord,
    /// Rows out of the shared maps.
    RemoveReachable,
    /// Drop everything on the link until it is gone.
    Detach,
    /// Remove redirects and await the proxy's completions, for a bounded time.
    AwaitProxy,
    /// Veth pair gone, and with it addresses and routes. Another plugin's link is as it was before.
    RemoveLink,
    /// Unpin programs, maps and links.
    RemovePrograms,
    /// Give the addresses back.
    ReleaseLeases,
    /// Close the intent: nothing of this id and epoch exists any more.
    CloseIntent,
}

impl UndoStep {
    /// True when a failure of this step may leave something of the endpoint. Its id, addresses and intent are then kept,
    /// and the undo is resumed.
    #[must_use]
    pub const fn must_succeed(self) -> bool {
        // Addresses rest until the proxy has let go of them. An open intent names only this epoch.
        !matches!(self, Self::AwaitProxy | Self::CloseIntent)
    }

    /// Name in the log.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RemoveRecord => "remove-record",
            Self::RemoveReachable => "remove-reachable",
            Self::Detach => "detach",
            Self::AwaitProxy => "await-proxy",
            Self::RemoveLink => "remove-link",
            Self::RemovePrograms => "remove-programs",
            Self::ReleaseLeases => "release-leases",
            Self::CloseIntent => "close-intent",
        }
    }

    /// Longest time the step may take, milliseconds. An undo step has the deadline of the same delete step.
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            Self::RemoveRecord | Self::CloseIntent => DeleteStep::RemoveRecord.deadline_ms(),
            Self::RemoveReachable => DeleteStep::RemoveReachable.deadline_ms(),
            Self::Detach => DeleteStep::Detach.deadline_ms(),
            Self::AwaitProxy => DeleteStep::AwaitProxy.deadline_ms(),
            Self::RemoveLink => DeleteStep::RemoveLink.deadline_ms(),
            Self::RemovePrograms => DeleteStep::Unpin.deadline_ms(),
            Self::ReleaseLeases => DeleteStep::ReleaseIps.deadline_ms(),
        }
    }
}

impl fmt::Display for UndoStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The steps of a create. Addresses that the caller leased before are not leased again, and so an undo does not release
/// them.
#[must_use]
pub fn plan_create(ip_owner: IpOwner) -> Vec<CreateStep> {
    CreateStep::ALL.into_iter().filter(|step| *step != CreateStep::Lease || ip_owner == IpOwner::Endpoint).collect()
}

/// The undo of a step; `None` when the undo of an earlier step removes this step's effects.
#[must_use]
pub const fn undo(step: CreateStep) -> Option<UndoStep> {
    match step {
        CreateStep::WriteIntent => Some(UndoStep::CloseIntent),
        CreateStep::Lease => Some(UndoStep::ReleaseLeases),
        CreateStep::EnsurePrograms => Some(UndoStep::RemovePrograms),
        CreateStep::EnsureLink => Some(UndoStep::RemoveLink),
        // The endpoint's rows of policy made it known to the proxy. The configuration row lives in the endpoint's own map,
        // which goes with its programs.
        CreateStep::EnsureConfig => Some(UndoStep::AwaitProxy),
        CreateStep::EnsureAttached => Some(UndoStep::Detach),
        // Addresses and routes go with the link.
        CreateStep::EnsureConnected => None,
        CreateStep::EnsureReachable => Some(UndoStep::RemoveReachable),
        CreateStep::Commit => Some(UndoStep::RemoveRecord),
    }
}

/// The undo of a failed create: the undos of its `begun` steps, in reverse order.
#[must_use]
pub fn plan_undo(begun: &[CreateStep]) -> Vec<UndoStep> {
    begun.iter().rev().filter_map(|step| undo(*step)).collect()
}

/// A step of a delete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeleteStep {
    /// Store an intent: a restarted agent resumes the delete.
    WriteIntent,
    /// Refuse new operations on the endpoint and await those in flight.
    RefuseWork,
    /// Replace the programs by one that drops everything.
    Detach,
    /// Remove the rows from the shared maps. Other endpoints no longer reach the endpoint.
    RemoveReachable,
    /// Remove redirects and await the proxy's completions, for a bounded time.
    AwaitProxy,
    /// Release the reference to the identity.
    ReleaseIdentity,
    /// Unpin programs, maps and links.
    Unpin,
    /// Routes and veth pair gone: nobody can find them any more. A delete is answered after this step. Another plugin's link stays, with the
    /// program that drops everything: its DEL, which comes after ours, removes the link, and nothing may pass until then.
    RemoveLink,
    /// Await the kernel's release of the removed link: grace periods of 15 ms and more.
    AwaitKernel,
    /// Release the addresses. No kernel object of the endpoint refers to them any more.
    ReleaseIps,
    /// Record removed and intent closed, in one transaction.
    RemoveRecord,
}

impl DeleteStep {
    /// Every step, in order.
    pub const ALL: [Self; 11] = [
        Self::WriteIntent,
        Self::RefuseWork,
        Self::Detach,
        Self::RemoveReachable,
        Self::AwaitProxy,
        Self::ReleaseIdentity,
        Self::Unpin,
        Self::RemoveLink,
        Self::AwaitKernel,
        Self::ReleaseIps,
        Self::RemoveRecord,
    ];

    /// The steps that remove an endpoint from the kernel and the proxy, in order. Every removal runs them, also one
    /// without a record.
    pub const REMOVAL: [Self; 5] =
        [Self::Detach, Self::RemoveReachable, Self::AwaitProxy, Self::Unpin, Self::RemoveLink];

    /// True when a failure of this step may leave kernel objects of the endpoint. Its record, addresses and id are
    /// then kept, and the delete is resumed.
    #[must_use]
    pub const fn must_succeed(self) -> bool {
        matches!(self, Self::RemoveReachable | Self::Unpin | Self::RemoveLink | Self::AwaitKernel)
    }

    /// Name in the endpoint's log, in errors of a delete and metrics' labels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::WriteIntent => "write-intent",
            Self::RefuseWork => "refuse-work",
            Self::Detach => "detach",
            Self::RemoveReachable => "remove-reachable",
            Self::AwaitProxy => "await-proxy",
            Self::ReleaseIdentity => "release-identity",
            Self::Unpin => "unpin",
            Self::RemoveLink => "remove-link",
            Self::AwaitKernel => "await-kernel",
            Self::ReleaseIps => "release-ips",
            Self::RemoveRecord => "remove-record",
        }
    }

    /// Longest time the step may take, milliseconds. A step that misses it is recorded as failed and the delete goes
    /// on. All of them but [`Self::AwaitKernel`], which comes after the answer, end before the shim stops waiting
    /// ([`DELETE_ANSWER`]); the build fails otherwise.
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            Self::WriteIntent | Self::RemoveRecord => 2_000,
            // A build that is cancelled ends at its next step, which has deadlines of its own.
            Self::RefuseWork => 1_000,
            Self::RemoveReachable => 1_000,
            // Replacing the attached programs takes RTNL, which link deletions hold one after another on a busy
            // machine.
            Self::Detach => 7_000,
            // Unpinning a tcx link may take RTNL too.
            Self::Unpin => 4_000,
            // A live proxy acknowledges in milliseconds. A dead one must not delay the delete.
            Self::AwaitProxy => 3_000,
            Self::ReleaseIdentity | Self::ReleaseIps => 500,
            // Removing a link takes RTNL. The kernel then waits for every processor to release the device, 12-16 ms;
            // where no notification tells of the removal before that, the step waits for it too.
            Self::RemoveLink | Self::AwaitKernel => 8_000,
        }
    }
}

/// The part of [`DELETE_ANSWER`] that request and answer take between shim and agent.
const DELETE_TRANSPORT: Duration = Duration::from_secs(1);

/// Longest time from a delete request to the end of the teardown. The removal of the record and the answer follow
/// while the shim still waits.
pub const TEARDOWN_BOUND: Duration = Duration::from_millis(delete_bound_ms() - DeleteStep::RemoveRecord.deadline_ms());

const _: () = assert!(
    Duration::from_millis(delete_bound_ms()).as_millis() + DELETE_TRANSPORT.as_millis() <= DELETE_ANSWER.as_millis(),
    "the shim stops waiting before the steps of a delete have used up their bounds"
);

/// The sum of the bounds of all steps but the one after the answer.
const fn delete_bound_ms() -> u64 {
    let (mut sum, mut n) = (0, 0);
    while n < DeleteStep::ALL.len() {
        if !matches!(DeleteStep::ALL[n], DeleteStep::AwaitKernel) {
            sum += DeleteStep::ALL[n].deadline_ms();
        }
        n += 1;
    }
    sum
}

impl fmt::Display for DeleteStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Options of a delete request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeleteOptions {
    /// NoIPRelease: the endpoint goes, its leases stay.
    pub no_ip_release: bool,
}

impl DeleteOptions {
    /// True when the delete releases the endpoint's addresses.
    #[must_use]
    pub fn releases_ips(self, record: &EndpointRecord) -> bool {
        !self.no_ip_release && record.ip_owner == IpOwner::Endpoint
    }
}

#[cfg(test)]
mod tests;
