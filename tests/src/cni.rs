//! The CNI protocol, spoken to the real plugin: environment and standard input, standard output and exit code.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    agent::Dirs,
    crash,
    process::{Finished, bin, command_in, crash_bin, run},
    space::Space,
};

/// Network name of [`NetConf::new`].
pub const NETWORK: &str = "harbour";

/// Where Debian's containernetworking-plugins are.
pub const DEBIANS_PLUGINS: &str = "/usr/lib/cni";

/// Longest a plugin may take: the ADD deadline of the plugin itself and a little.
const LIMIT: Duration = Duration::from_secs(70);

/// A network configuration, as a runtime passes it on standard input.
#[derive(Debug, Clone)]
pub struct NetConf {
    keys: Map<String, Value>,
}

impl NetConf {
    /// The least that is enough: version, name, type, socket.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        let mut keys = Map::new();
        keys.insert("cniVersion".into(), json!("1.1.0"));
        keys.insert("name".into(), json!(NETWORK));
        keys.insert("type".into(), json!("wharf-cni"));
        keys.insert("socket".into(), json!(socket));
        Self { keys }
    }

    /// Sets a key.
    #[must_use]
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.keys.insert(key.to_owned(), value);
        self
    }

    /// Takes a key away.
    #[must_use]
    pub fn without(mut self, key: &str) -> Self {
        self.keys.remove(key);
        self
    }

    /// Sets `cniVersion`.
    #[must_use]
    pub fn version(self, version: &str) -> Self {
        self.with("cniVersion", json!(version))
    }

    /// Sets `prevResult`, as CHECK and DEL get it.
    #[must_use]
    pub fn after(self, result: &Value) -> Self {
        self.with("prevResult", result.clone())
    }

    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        Value::Object(self.keys.clone()).to_string().into_bytes()
    }
}

/// One call of the plugin, before it is made.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    space: &'a Space,
    environment: Vec<(String, String)>,
    stdin: Vec<u8>,
    armed: Option<Dirs>,
}

impl<'a> Call<'a> {
    /// A call of `command` from within `space` (the node's).
    #[must_use]
    pub fn new(space: &'a Space, command: &str) -> Self {
        let environment = vec![
            ("CNI_COMMAND".to_owned(), command.to_owned()),
            ("CNI_PATH".to_owned(), format!("/opt/cni/bin:{DEBIANS_PLUGINS}")),
        ];
        Self { space, environment, stdin: Vec::new(), armed: None }
    }

    /// Sets a variable of the environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.retain(|(n, _)| n != name);
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets CNI_CONTAINERID, CNI_NETNS and CNI_IFNAME.
    #[must_use]
    pub fn of(self, container: &str, netns: &Path, ifname: &str) -> Self {
        self.env("CNI_CONTAINERID", container).env("CNI_NETNS", &netns.display().to_string()).env("CNI_IFNAME", ifname)
    }

    /// Sets standard input.
    #[must_use]
    pub fn conf(self, conf: &NetConf) -> Self {
        self.stdin(&conf.bytes())
    }

    /// Sets standard input to any bytes.
    #[must_use]
    pub fn stdin(mut self, bytes: &[u8]) -> Self {
        self.stdin = bytes.to_vec();
        self
    }

    /// Takes the plugin with crash points ([`crash`]) of the node with these directories.
    #[must_use]
    pub fn armed(mut self, dirs: &Dirs) -> Self {
        self.armed = Some(dirs.clone());
        self
    }

    /// Runs the plugin.
    ///
    /// # Errors
    /// When it cannot be started or does not end. What it answers is in [`Answer`].
    pub fn run(self) -> Result<Answer> {
        self.ready()?.run()
    }

    /// The call with everything it needs, to be made by another thread.
    ///
    /// # Errors
    /// When the plugin was not built.
    pub fn ready(self) -> Result<Ready> {
        let program = if self.armed.is_some() { crash_bin("wharf-cni")? } else { bin("wharf-cni")? };
        let mut command = command_in(self.space, program)?;
        command.env_clear().envs(self.environment.iter().map(|(n, v)| (n, v)));
        if let Some(dirs) = &self.armed {
            command.envs(crash::environment(dirs));
        }
        Ok(Ready { command, stdin: self.stdin })
    }
}

/// A call that borrows nothing.
#[derive(Debug)]
pub struct Ready {
    command: Command,
    stdin: Vec<u8>,
}

impl Ready {
    /// Runs the plugin.
    ///
    /// # Errors
    /// As [`Call::run`].
    pub fn run(self) -> Result<Answer> {
        Ok(Answer { finished: run(self.command, &self.stdin, LIMIT)? })
    }
}

/// What the plugin answered.
#[derive(Debug)]
pub struct Answer {
    /// Exit code, output and time.
    pub finished: Finished,
}

/// A CNI error as it stands on standard output.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Failure {
    /// Version of the error's form.
    #[serde(rename = "cniVersion")]
    pub cni_version: String,
    /// The spec's code.
    pub code: u32,
    /// Short.
    pub msg: String,
    /// Long.
    #[serde(default)]
    pub details: String,
}

impl Failure {
    /// All its words, for assertions on the text.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{} {}", self.msg, self.details)
    }
}

impl Answer {
    /// The JSON a command that succeeded printed.
    ///
    /// # Errors
    /// When it failed, or did not print one JSON document.
    pub fn result(&self) -> Result<Value> {
        ensure!(self.finished.status.success(), "{}", self.finished.describe());
        serde_json::from_str(&self.finished.stdout).with_context(|| self.finished.describe())
    }

    /// A success that prints nothing (DEL, CHECK, GC, STATUS).
    ///
    /// # Errors
    /// When it failed or printed something.
    pub fn silent(&self) -> Result<()> {
        ensure!(self.finished.status.success() && self.finished.stdout.is_empty(), "{}", self.finished.describe());
        Ok(())
    }

    /// The error of a command that failed, in the spec's form: exit code not 0, one JSON document on standard output.
    ///
    /// # Errors
    /// When it succeeded, was killed, or printed something else.
    pub fn failure(&self) -> Result<Failure> {
        ensure!(self.finished.code() > 0, "an error was expected: {}", self.finished.describe());
        serde_json::from_str(&self.finished.stdout).with_context(|| self.finished.describe())
    }
}
