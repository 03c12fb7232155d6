//! Steps of create and delete as data, for one executor.
//!
//! A failed create is undone in reverse ([`plan_undo`]). Each step is recorded *before* it runs, so that the undo
//! covers a half-completed step. A delete is never undone: steps are idempotent, and a failure is recorded and does
//! not stop it.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use wharf_handover::DELETE_ANSWER;

use crate::endpoint::{EndpointRecord, IpOwner};

/// A create step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CreateStep {
    /// Store an intent: side effects of this id and epoch may exist.
    WriteIntent,
    /// Lease the addresses in memory; durable with [`CreateStep::Commit`].
    Lease,
    /// Load and pin programs and maps, or take a preloaded set.
    EnsurePrograms,
    /// Create the veth pair, both sides down. For another plugin's link: verify that it is the inspected one.
    EnsureLink,
    /// Write the configuration row, live.
    EnsureConfig,
    /// Attach the programs: from then on policy applies to every packet, so the link may come up.
    EnsureAttached,
    /// Add addresses and routes on both sides and bring the link up. Changes nothing on another plugin's link.
    EnsureConnected,
    /// Write the shared-map rows: other endpoints can reach the endpoint.
    EnsureReachable,
    /// Store endpoint and leases and close the intent, in one transaction.
    Commit,
}

impl CreateStep {
    /// All steps, in order.
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

    /// Name in the endpoint's log and in metrics labels.
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

    /// Deadline, milliseconds: over a hundred times the usual duration, to stop steps that hang. The sum is below the
    /// runtimes' 30 s.
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            // A flush to a busy disk may take a second.
            Self::WriteIntent | Self::Commit => 3_000,
            // In memory, plus up to a second for checks of resting addresses when no other is free.
            Self::Lease => 1_500,
            // The verifier may be short of CPU time.
            Self::EnsurePrograms => 8_000,
            // RTNL is global: 16 creates and many deletes may queue for it.
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

/// Undo of a create step. Succeeds when there is nothing to undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UndoStep {
    /// Remove record and leases from the store, if committed.
    RemoveRecord,
    /// Remove the shared-map rows.
    RemoveReachable,
    /// Drop all packets on the link until its removal.
    Detach,
    /// Remove redirects and await the proxy's completions, bounded.
    AwaitProxy,
    /// Remove the veth pair with its addresses and routes. Restore another plugin's link.
    RemoveLink,
    /// Unpin programs, maps and links.
    RemovePrograms,
    /// Release the addresses.
    ReleaseLeases,
    /// Close the intent: nothing of this id and epoch exists.
    CloseIntent,
}

impl UndoStep {
    /// True when a failure may leave objects. Id, addresses and intent are then kept and the undo resumes.
    #[must_use]
    pub const fn must_succeed(self) -> bool {
        // Addresses rest until the proxy has released them. An open intent concerns only this epoch.
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

    /// Deadline of the corresponding delete step, milliseconds.
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

/// The create steps. A caller's addresses are neither leased nor, in the undo, released.
#[must_use]
pub fn plan_create(ip_owner: IpOwner) -> Vec<CreateStep> {
    CreateStep::ALL.into_iter().filter(|step| *step != CreateStep::Lease || ip_owner == IpOwner::Endpoint).collect()
}

/// Undo of a step; `None` when another undo covers it.
#[must_use]
pub const fn undo(step: CreateStep) -> Option<UndoStep> {
    match step {
        CreateStep::WriteIntent => Some(UndoStep::CloseIntent),
        CreateStep::Lease => Some(UndoStep::ReleaseLeases),
        CreateStep::EnsurePrograms => Some(UndoStep::RemovePrograms),
        CreateStep::EnsureLink => Some(UndoStep::RemoveLink),
        // The policy rows made the endpoint known to the proxy. The undo of the programs removes the configuration
        // row's map.
        CreateStep::EnsureConfig => Some(UndoStep::AwaitProxy),
        CreateStep::EnsureAttached => Some(UndoStep::Detach),
        // Addresses and routes disappear with the link.
        CreateStep::EnsureConnected => None,
        CreateStep::EnsureReachable => Some(UndoStep::RemoveReachable),
        CreateStep::Commit => Some(UndoStep::RemoveRecord),
    }
}

/// Undo of a failed create: the undos of the `begun` steps, reversed.
#[must_use]
pub fn plan_undo(begun: &[CreateStep]) -> Vec<UndoStep> {
    begun.iter().rev().filter_map(|step| undo(*step)).collect()
}

/// A delete step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeleteStep {
    /// Store an intent: a restarted agent resumes the delete.
    WriteIntent,
    /// Refuse new operations on the endpoint and await the running ones.
    RefuseWork,
    /// Replace the programs with one that drops everything.
    Detach,
    /// Remove the shared-map rows: other endpoints cannot reach the endpoint.
    RemoveReachable,
    /// Remove redirects and await the proxy's completions, bounded.
    AwaitProxy,
    /// Release the identity reference.
    ReleaseIdentity,
    /// Unpin programs, maps and links.
    Unpin,
    /// Remove routes and veth pair from every look-up; then the DEL is answered. Another plugin's link stays, with
    /// the program that drops everything, until that plugin's DEL after Wharf's: no packet may pass meanwhile.
    RemoveLink,
    /// Await the kernel's release of the link: grace periods of 15 ms and more.
    AwaitKernel,
    /// Release the addresses, to which no kernel object of the endpoint refers.
    ReleaseIps,
    /// Remove the record and close the intent, in one transaction.
    RemoveRecord,
}

impl DeleteStep {
    /// All steps, in order.
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

    /// Steps of every removal from kernel and proxy, in order, even without a record.
    pub const REMOVAL: [Self; 5] =
        [Self::Detach, Self::RemoveReachable, Self::AwaitProxy, Self::Unpin, Self::RemoveLink];

    /// True when a failure may leave kernel objects. Record, addresses and id are then kept and the delete resumes.
    #[must_use]
    pub const fn must_succeed(self) -> bool {
        matches!(self, Self::RemoveReachable | Self::Unpin | Self::RemoveLink | Self::AwaitKernel)
    }

    /// Name in the endpoint's log, in errors and in metrics labels.
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

    /// Deadline, milliseconds. A missed one is a failed step; the delete continues. All but [`Self::AwaitKernel`],
    /// which follows the answer, must fit into the shim's wait ([`DELETE_ANSWER`]), or the build fails.
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            Self::WriteIntent | Self::RemoveRecord => 2_000,
            // A cancelled build ends at its next step, which has a deadline.
            Self::RefuseWork => 1_000,
            Self::RemoveReachable => 1_000,
            // Replacing programs takes RTNL, for which link deletions queue on a busy node.
            Self::Detach => 7_000,
            // Unpinning a tcx link may take RTNL.
            Self::Unpin => 4_000,
            // A live proxy acknowledges in milliseconds; a dead one must not delay the delete.
            Self::AwaitProxy => 3_000,
            Self::ReleaseIdentity | Self::ReleaseIps => 500,
            // Takes RTNL. Then every processor must release the device, 12-16 ms, which the step awaits without an
            // earlier notification.
            Self::RemoveLink | Self::AwaitKernel => 8_000,
        }
    }
}

/// Part of [`DELETE_ANSWER`] for the request and answer between shim and agent.
const DELETE_TRANSPORT: Duration = Duration::from_secs(1);

/// Longest time from delete request to end of teardown; record removal and answer follow within the shim's wait.
pub const TEARDOWN_BOUND: Duration = Duration::from_millis(delete_bound_ms() - DeleteStep::RemoveRecord.deadline_ms());

const _: () = assert!(
    Duration::from_millis(delete_bound_ms()).as_millis() + DELETE_TRANSPORT.as_millis() <= DELETE_ANSWER.as_millis(),
    "the shim stops waiting before the steps of a delete have used up their bounds"
);

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

/// Delete options.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeleteOptions {
    /// NoIPRelease: keep the leases.
    pub no_ip_release: bool,
}

impl DeleteOptions {
    /// True when the delete releases the addresses.
    #[must_use]
    pub fn releases_ips(self, record: &EndpointRecord) -> bool {
        !self.no_ip_release && record.ip_owner == IpOwner::Endpoint
    }
}

#[cfg(test)]
mod tests;
