//! Settings of the agent.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use wharf_names::endpoint::Enforcement;

/// Body of `GET|PATCH /v1/config`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentConfigView {
    /// Effective settings, by flag name.
    pub effective: BTreeMap<String, String>,
    /// Settings that `PATCH` may change.
    pub mutable: Vec<String>,
    /// Sources, by name.
    #[serde(default)]
    pub origin: BTreeMap<String, SettingOrigin>,
}

/// Source of a setting, ascending precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SettingOrigin {
    /// The default; no other source sets it.
    Default,
    /// The configuration file.
    File,
    /// A `WHARF_*` variable.
    Environment,
    /// A command line flag.
    Flag,
    /// Run time; lost at a restart.
    RunTime,
}

impl SettingOrigin {
    /// The name in words.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::File => "file",
            Self::Environment => "environment",
            Self::Flag => "flag",
            Self::RunTime => "run time",
        }
    }
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// Body of `PATCH /v1/config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentConfigPatch {
    /// `error`, `warn`, `info`, `debug`, `trace` or `off`, or comma-separated `target=level` pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 1024, example = "wharf_agent=debug,info")]
    pub log_level: Option<String>,
    /// Format of log lines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_format: Option<LogFormat>,
    /// Trace forwarded packets of all endpoints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trace: Option<bool>,
    /// Show one in this many traced packets; 0 and 1 show all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 1_000_000)]
    pub trace_sampling: Option<u32>,
    /// When policy is enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy_enforcement: Option<Enforcement>,
}
