//! Describes this run to the agent, in requests and reports.

use std::{
    cell::Cell,
    ffi::OsStr,
    hash::{BuildHasher as _, RandomState},
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use wharf_handover::{
    command::{Command, MAX_POD_BYTES, Verb},
    report::{Outcome, Report, Reports, VERSION},
};

use crate::{
    fault::{Fault, Origin},
    request::Env,
    rules,
};

#[derive(Debug, Clone)]
pub(crate) struct Run {
    command: Command,
    chained: Cell<bool>,
    /// The shim reports the outcome, because the agent's answer does not end the command.
    is_judge: bool,
    began: Instant,
}

impl Run {
    /// `None` for a command that is not counted.
    pub(crate) fn of(env: &Env) -> Option<Self> {
        let text = |value: &Option<std::ffi::OsString>| value.as_deref().and_then(OsStr::to_str).map(str::to_owned);
        let verb = Verb::parse(&text(&env.command)?)?;
        let valid = |value, rule: fn(&str) -> Result<(), &'static str>| {
            text(value).filter(|text| verb != Verb::Gc && rule(text).is_ok()).unwrap_or_default()
        };
        let args = text(&env.args).unwrap_or_default();
        Some(Self {
            command: Command {
                id: RandomState::new().hash_one(0_u8),
                verb,
                network: String::new(),
                container_id: valid(&env.container_id, rules::name),
                ifname: valid(&env.ifname, rules::ifname),
                pod_name: pod(&args, "K8S_POD_NAME"),
                pod_namespace: pod(&args, "K8S_POD_NAMESPACE"),
                chained: false,
                runtime: env.runtime.clone().unwrap_or_default(),
            },
            chained: Cell::new(false),
            is_judge: verb == Verb::Check,
            began: Instant::now(),
        })
    }

    pub(crate) fn on(mut self, network: &str) -> Self {
        network.clone_into(&mut self.command.network);
        self
    }

    pub(crate) fn set_chained(&self) {
        self.chained.set(true);
    }

    fn command(&self) -> Command {
        Command { chained: self.chained.get(), ..self.command.clone() }
    }

    /// An IPAM plugin runs after the agent, except in an ADD.
    pub(crate) fn with_ipam(self) -> Self {
        Self { is_judge: self.command.verb != Verb::Add, ..self }
    }

    pub(crate) fn header(&self) -> Option<String> {
        (!self.is_judge).then(|| self.command().to_header(self.began.elapsed()))
    }

    /// Skipped if the agent counted the command.
    pub(crate) fn report(self, end: &End<'_>, origin: &Origin) -> Result<(), String> {
        let counted = match end {
            End::Success { counted, .. } => *counted,
            End::Deferred => false,
            End::Failure(fault) => fault.counted,
        };
        // No agent receives it without a socket.
        let Some(socket) = origin.socket.as_deref().filter(|_| !counted || self.is_judge) else {
            return Ok(());
        };
        let reports = Reports::of_socket(socket);
        let (outcome, fault) = match end {
            End::Success { .. } => (Outcome::Success, None),
            End::Deferred => (Outcome::Deferred, None),
            End::Failure(fault) => (Outcome::Failure, Some(fault)),
        };
        let report = Report {
            version: VERSION,
            outcome,
            found_nothing: matches!(end, End::Success { found_nothing: true, .. }),
            code: fault.map(|fault| fault.code.number()),
            message: fault.map(|fault| fault.msg.clone()).unwrap_or_default(),
            duration_us: number(self.began.elapsed().as_micros()),
            ended_unix_ms: number(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()),
            dropped: 0,
            command: self.on(&origin.network).command(),
        };
        match reports.put(&report) {
            // No agent has run in this boot.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
            put => put.map_err(|e| format!("leave a report in {}: {e}", reports.path().display())),
        }
    }
}

pub(crate) enum End<'a> {
    Success {
        counted: bool,
        found_nothing: bool,
    },
    /// By a deletion record.
    Deferred,
    Failure(&'a Fault),
}

/// Empty if absent or too long.
fn pod(args: &str, key: &str) -> String {
    let value = args.split(';').find_map(|pair| pair.split_once('=').filter(|(name, _)| *name == key));
    value.map(|(_, value)| value.to_owned()).filter(|value| value.len() <= MAX_POD_BYTES).unwrap_or_default()
}

fn number(n: u128) -> u64 {
    u64::try_from(n).unwrap_or(u64::MAX)
}
