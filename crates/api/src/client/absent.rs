//! Advice for an agent that does not run.

use std::path::Path;

/// Paths of the agent's systemd unit.
const UNITS: [&str; 4] = [
    "/etc/systemd/system/wharf-agent.service",
    "/run/systemd/system/wharf-agent.service",
    "/usr/local/lib/systemd/system/wharf-agent.service",
    "/usr/lib/systemd/system/wharf-agent.service",
];
const KUBELET: &str = "/var/lib/kubelet";

/// Advice on how to find out why the agent does not run, by installation.
#[must_use]
pub fn why_agent_is_away() -> &'static str {
    let in_a_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    why_away(|path| Path::new(path).exists(), in_a_pod)
}

fn why_away(exists: impl Fn(&str) -> bool, in_a_pod: bool) -> &'static str {
    if UNITS.into_iter().any(&exists) {
        "see why the agent is away: `systemctl status wharf-agent`"
    } else if in_a_pod || exists(KUBELET) {
        "see why the agent's pod on this node is away: `kubectl get pods --namespace wharf --output wide`, then \
         `kubectl logs --namespace wharf POD`"
    } else {
        "this node has no unit of the agent: start `wharf-agent` as root, and read what it prints"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_fits_the_installation() {
        let hint = |there: &[&str], in_a_pod| why_away(|path| there.contains(&path), in_a_pod);
        assert!(hint(&[], false).contains("start `wharf-agent`"));
        assert!(hint(&[], true).contains("kubectl"), "in the agent's container");
        assert!(hint(&[KUBELET], false).contains("kubectl"));
        assert!(hint(&[KUBELET, UNITS[3]], false).contains("systemctl"), "a node of Kubernetes with the package");
    }
}
