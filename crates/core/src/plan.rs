//! Steps of create and delete as data, for one executor.
//!
//! A failed create is undone in reverse. Each step is recorded *before* it runs: the undo covers a half-completed step.
//! A delete is never undone: steps are idempotent, and a failure does not stop it.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use wharf_handover::DELETE_ANSWER;

use crate::endpoint::{EndpointRecord, IpOwner};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CreateStep {
    /// Store an intent before side effects.
    WriteIntent,
    /// In memory.
    Lease,
    /// Load and pin programs and maps, or take a prepared set.
    EnsurePrograms,
    /// Create the link, or verify another plugin's link.
    EnsureLink,
    /// Write the configuration row.
    EnsureConfig,
    /// Attach the programs: policy applies, so the link may come up.
    EnsureAttached,
    /// Add addresses and routes and bring the link up; before the node's route, write the shared-map rows.
    EnsureConnected,
    /// Write the shared-map rows for other endpoints that are missing or have changed, and publish ports.
    EnsureReachable,
    /// Store endpoint and leases, close the intent: one transaction.
    Commit,
}

impl CreateStep {
    /// In order.
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

    /// In logs and metrics labels.
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

    /// Milliseconds: over a hundred times the usual duration; the sum is below the runtimes' 30 s.
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            // A busy disk may take a second.
            Self::WriteIntent | Self::Commit => 3_000,
            // Resting addresses may need checks.
            Self::Lease => 1_500,
            // The verifier may lack CPU time.
            Self::EnsurePrograms => 8_000,
            // RTNL is global: 16 creates and many deletes may queue.
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

/// An undo step; succeeds without anything to undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UndoStep {
    /// Remove a committed record and its leases.
    RemoveRecord,
    /// Remove the shared-map rows.
    RemoveReachable,
    /// Drop all packets until the link's removal.
    Detach,
    /// Await the proxy's completions, bounded.
    AwaitProxy,
    /// Remove the link; restore another plugin's link.
    RemoveLink,
    /// Unpin programs, maps and links.
    RemovePrograms,
    /// Release the addresses.
    ReleaseLeases,
    /// Close the intent: no side effects remain.
    CloseIntent,
}

impl UndoStep {
    /// After a failure, id, addresses and intent are kept and the undo resumes.
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

    /// As the delete step, milliseconds.
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            Self::RemoveRecord | Self::CloseIntent => DeleteStep::RemoveRecord.deadline_ms(),
            // Like a detachment, it can wait for the kernel's lock.
            Self::RemoveReachable | Self::Detach => DeleteStep::Detach.deadline_ms(),
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

/// A caller's addresses are neither leased nor released.
#[must_use]
pub fn plan_create(ip_owner: IpOwner) -> Vec<CreateStep> {
    CreateStep::ALL.into_iter().filter(|step| *step != CreateStep::Lease || ip_owner == IpOwner::Endpoint).collect()
}

/// `None` when another undo covers the step.
#[must_use]
pub const fn undo(step: CreateStep) -> Option<UndoStep> {
    match step {
        CreateStep::WriteIntent => Some(UndoStep::CloseIntent),
        CreateStep::Lease => Some(UndoStep::ReleaseLeases),
        CreateStep::EnsurePrograms => Some(UndoStep::RemovePrograms),
        CreateStep::EnsureLink => Some(UndoStep::RemoveLink),
        // The policy rows made the endpoint known to the proxy.
        CreateStep::EnsureConfig => Some(UndoStep::AwaitProxy),
        CreateStep::EnsureAttached => Some(UndoStep::Detach),
        // Addresses and routes disappear with the link.
        CreateStep::EnsureConnected => Some(UndoStep::RemoveReachable),
        // The undo of ensure-connected removes the rows and the published ports.
        CreateStep::EnsureReachable => None,
        CreateStep::Commit => Some(UndoStep::RemoveRecord),
    }
}

/// Undos of the `begun` steps, reversed.
#[must_use]
pub fn plan_undo(begun: &[CreateStep]) -> Vec<UndoStep> {
    begun.iter().rev().filter_map(|step| undo(*step)).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeleteStep {
    /// Store an intent: a restarted agent resumes the delete.
    WriteIntent,
    /// Refuse new operations, await the running ones.
    RefuseWork,
    /// Replace the programs with the sink.
    Detach,
    /// Remove the shared-map rows for other endpoints.
    RemoveReachable,
    /// Await the proxy's completions, bounded.
    AwaitProxy,
    /// Release the identity reference.
    ReleaseIdentity,
    /// Unpin programs, maps and links.
    Unpin,
    /// Remove routes and link from look-ups; then answer. Another plugin's link keeps the sink until that plugin's
    /// DEL: no packet may pass meanwhile.
    RemoveLink,
    /// Await the release of the link: 15 ms and more.
    AwaitKernel,
    /// Release the addresses: no kernel object refers to them.
    ReleaseIps,
    /// Remove the record, close the intent: one transaction.
    RemoveRecord,
}

impl DeleteStep {
    /// In order.
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

    /// Every removal from kernel and proxy, even without a record.
    pub const REMOVAL: [Self; 5] =
        [Self::Detach, Self::RemoveReachable, Self::AwaitProxy, Self::Unpin, Self::RemoveLink];

    /// After a failure, record, addresses and id are kept and the delete resumes.
    #[must_use]
    pub const fn must_succeed(self) -> bool {
        matches!(self, Self::RemoveReachable | Self::Unpin | Self::RemoveLink | Self::AwaitKernel)
    }

    /// In logs, errors and metrics labels.
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

    /// Milliseconds. All but [`Self::AwaitKernel`], which follows the answer, must fit into the shim's wait
    /// ([`DELETE_ANSWER`]).
    #[must_use]
    pub const fn deadline_ms(self) -> u64 {
        match self {
            Self::WriteIntent | Self::RemoveRecord => 2_000,
            // A cancelled build ends at its next step.
            Self::RefuseWork => 1_000,
            Self::RemoveReachable => 1_000,
            // RTNL: link deletions queue for it.
            Self::Detach => 7_000,
            // A tcx link may need RTNL.
            Self::Unpin => 4_000,
            // A live proxy needs milliseconds; a dead one must not delay the delete.
            Self::AwaitProxy => 3_000,
            Self::ReleaseIdentity | Self::ReleaseIps => 500,
            // RTNL; then every processor must release the device, 12-16 ms.
            Self::RemoveLink | Self::AwaitKernel => 8_000,
        }
    }
}

/// For request and answer between shim and agent.
const DELETE_TRANSPORT: Duration = Duration::from_secs(1);

/// Until the end of teardown; record removal and answer follow within the shim's wait.
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

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DeleteOptions {
    /// NoIPRelease.
    pub no_ip_release: bool,
}

impl DeleteOptions {
    /// Whether addresses are released.
    #[must_use]
    pub fn releases_ips(self, record: &EndpointRecord) -> bool {
        !self.no_ip_release && record.ip_owner == IpOwner::Endpoint
    }
}

#[cfg(test)]
mod tests;
