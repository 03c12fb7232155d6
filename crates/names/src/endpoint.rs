//! States, builds and enforcement of endpoints, as in API, records and settings.

use std::fmt;

use serde::{Deserialize, Serialize};

/// State of an endpoint's state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = EndpointState))]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum State {
    /// The labels have no identity yet.
    WaitingForIdentity,
    /// A build is due.
    WaitingToRegenerate,
    /// A build is running.
    Regenerating,
    /// Realized equals desired.
    Ready,
    /// Read from the store after a restart; not rebuilt yet.
    Restoring,
    /// Deletion is in progress.
    Disconnecting,
    /// Deleted.
    Disconnected,
    /// Create failed.
    Invalid,
}

impl State {
    /// In table order.
    pub const ALL: [Self; 8] = [
        Self::WaitingForIdentity,
        Self::WaitingToRegenerate,
        Self::Regenerating,
        Self::Ready,
        Self::Restoring,
        Self::Disconnecting,
        Self::Disconnected,
        Self::Invalid,
    ];

    /// In API, CLI and metrics labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::WaitingForIdentity => "waiting-for-identity",
            Self::WaitingToRegenerate => "waiting-to-regenerate",
            Self::Regenerating => "regenerating",
            Self::Ready => "ready",
            Self::Restoring => "restoring",
            Self::Disconnecting => "disconnecting",
            Self::Disconnected => "disconnected",
            Self::Invalid => "invalid",
        }
    }

    /// No event leaves the state. Gauges exclude it.
    #[must_use]
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Disconnected | Self::Invalid)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Scope of a regeneration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = RegenerateLevel))]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Level {
    /// Maps and redirects only.
    Policy,
    /// Also programs.
    Datapath,
}

impl Level {
    /// In API, CLI and metrics labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Datapath => "datapath",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// When policy is enforced. Source enforcement (a container may send only from its addresses) is not policy and is
/// always on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema), schema(as = PolicyEnforcement))]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Enforcement {
    /// For endpoints that a policy selects.
    #[default]
    Default,
    /// For every endpoint.
    Always,
    /// For no endpoint.
    Never,
}

impl Enforcement {
    /// The mode `default`.
    #[must_use]
    pub fn is_default(&self) -> bool {
        *self == Self::Default
    }

    /// In settings, API and CLI.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Always => "always",
            Self::Never => "never",
        }
    }
}
