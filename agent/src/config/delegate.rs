//! Settings excluded in delegated mode.

use std::{
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use super::{AgentConfig, ConfigError, error::setting};

/// Packages set state directory and bpffs.
const ALLOWED: [&str; 11] = [
    "bpffs",
    "check-config",
    "config",
    "delegate",
    "log-format",
    "log-level",
    "metrics-listen",
    "node-name",
    "otlp-endpoint",
    "run-dir",
    "state-dir",
];

pub(super) fn is_allowed(name: &str) -> bool {
    ALLOWED.contains(&name)
}

/// `sun_path` without its terminator, bytes.
pub(super) const MAX_SOCKET: usize = 107;

pub(super) fn socket(path: PathBuf) -> Result<PathBuf, ConfigError> {
    let length = path.as_os_str().as_bytes().len();
    if !path.is_absolute() || length > MAX_SOCKET {
        let message = format!("{} is not an absolute path of at most {MAX_SOCKET} bytes", path.display());
        return Err(setting("delegate", message));
    }
    Ok(path)
}

pub(super) fn alone(config: &AgentConfig) -> Result<(), ConfigError> {
    let Some(service) = config.delegate.as_deref() else { return Ok(()) };
    match config.origins.keys().find(|name| !is_allowed(name)) {
        Some(other) => Err(beside(service, other)),
        None => Ok(()),
    }
}

fn beside(service: &Path, other: &str) -> ConfigError {
    let other = if other.starts_with("pool.") { "pool" } else { other };
    let message = format!(
        "{} beside {other}: the service makes the network of this node's containers, and {other} is about one that the agent makes; \
         leave one of the two out",
        service.display()
    );
    setting("delegate", message)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::config::parse;

    fn load(arguments: &[&str]) -> Result<AgentConfig, String> {
        let all: Vec<OsString> =
            std::iter::once("wharf-agent").chain(arguments.iter().copied()).map(OsString::from).collect();
        AgentConfig::of(&parse(&all).expect("parses")).map_err(|e| e.to_string())
    }

    #[test]
    fn a_delegate_excludes_a_network_of_the_agents_own_and_both_are_named() {
        let service = ["--delegate", "/run/net.sock"];
        let config = load(&[&service[..], &["--node-name", "n", "--metrics-listen", "127.0.0.1:1"]].concat());
        assert_eq!(config.expect("loads").delegate, Some("/run/net.sock".into()));
        for other in [["--ipv4-pool", "10.0.0.0/8"], ["--masquerade", "off"], ["--envoy", "/x"], ["--mtu", "1400"]] {
            let refused = load(&[&service[..], &other].concat()).expect_err("refused");
            assert!(refused.starts_with("setting delegate (--delegate): /run/net.sock beside"), "{refused}");
            assert!(refused.contains(other[0].trim_start_matches('-')), "{refused}");
        }
        let directory = tempfile::tempdir().expect("make directory");
        let file = directory.path().join("agent.toml");
        std::fs::write(&file, "delegate = '/run/net.sock'\n[[pool]]\nname = 'blue'\ncidrs = ['10.9.0.0/24']")
            .expect("write");
        let refused = load(&["--config", &file.display().to_string()]).expect_err("refused");
        assert!(refused.contains("agent.toml): /run/net.sock beside pool:"), "{refused}");
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused() {
        for path in ["net.sock", &format!("/{}", "x".repeat(MAX_SOCKET))] {
            assert!(load(&[&format!("--delegate={path}")]).is_err(), "{path}");
        }
        assert!(load(&[&format!("--delegate=/{}", "x".repeat(MAX_SOCKET - 1))]).is_ok());
    }
}
