//! The policies that are measured, as an operator would write them.

/// The port of web servers.
pub(super) const WEB: u16 = 80;
/// A path that rules let pass.
pub(super) const ALLOWED: &str = "/public";
/// A path that they do not.
pub(super) const DENIED: &str = "/secret";

/// A policy about the containers with the label `app`: what others may ask the port of web servers for (`ingress`), or
/// what these may ask others for (`egress`). All high ports are open, without rules about requests.
pub(super) fn policy(app: &str, direction: &str, requests: bool) -> String {
    let rules = if requests { format!(", rules: {{http: [{{method: GET, path: {ALLOWED}}}]}}") } else { String::new() };
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumClusterwideNetworkPolicy\nmetadata: {{name: {app}}}\nspec:\n  \
         endpointSelector: {{matchLabels: {{app: {app}}}}}\n  {direction}:\n  \
         - toPorts: [{{ports: [{{port: '{WEB}', protocol: TCP}}]{rules}}}]\n  \
         - toPorts: [{{ports: [{{port: '1024', endPort: 65535, protocol: TCP}}]}}]\n---\n"
    )
}

#[cfg(test)]
mod tests {
    use wharf_policy::read::read;

    use super::*;

    #[test]
    fn the_policies_differ_in_requests_alone() {
        for (direction, requests) in [("ingress", true), ("egress", true), ("ingress", false)] {
            let policies = read("t", &policy("server", direction, requests)).expect("valid");
            let with_requests = policies[0].rules.iter().filter(|rule| rule.requests.is_some()).count();
            assert_eq!((policies[0].rules.len(), with_requests), (2, usize::from(requests)));
        }
    }
}
