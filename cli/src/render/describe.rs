//! `describe` commands: an object from several answers.

use serde::Serialize;
use wharf_api::{Endpoint, EndpointLogEntry, Namespace, PolicyInfo};

use super::{
    Style,
    endpoint::{self, Columns},
    policy::full_name,
    screen::Screen,
};

#[derive(Debug, Serialize)]
pub(crate) struct EndpointDetails {
    pub(crate) endpoint: Endpoint,
    #[serde(skip)]
    pub(crate) redirects: Vec<String>,
    /// Absent in delegated mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) policies: Option<EndpointPolicies>,
    pub(crate) events: Vec<EndpointLogEntry>,
}

/// Names of selecting policies.
#[derive(Debug, Serialize)]
pub(crate) struct EndpointPolicies {
    pub(crate) ingress: Vec<String>,
    pub(crate) egress: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct PolicyDetails {
    pub(crate) policy: PolicyInfo,
    pub(crate) endpoints: Vec<Endpoint>,
}

#[derive(Debug, Serialize)]
pub(crate) struct NamespaceDetails {
    pub(crate) namespace: Namespace,
    pub(crate) policies: Vec<PolicyInfo>,
    pub(crate) endpoints: Vec<Endpoint>,
}

pub(crate) fn endpoint(d: &EndpointDetails, style: &Style) -> String {
    let mut screen = Screen::new(style);
    screen.block(&endpoint::get(&d.endpoint, &d.redirects, style));
    if let Some(EndpointPolicies { ingress, egress }) = &d.policies {
        screen.line("Ingress policies", &or_none(ingress));
        screen.line("Egress policies", &or_none(egress));
    }
    screen.gap();
    screen.heading("Events:");
    screen.block(&endpoint::log(&d.events, style));
    screen.finish()
}

pub(crate) fn policies(all: &[PolicyDetails], style: &Style) -> String {
    let mut screen = Screen::new(style);
    for (at, PolicyDetails { policy, endpoints }) in all.iter().enumerate() {
        if at > 0 {
            screen.gap();
        }
        screen.line("Policy", &full_name(&policy.kind, policy.namespace.as_deref(), &policy.name));
        let priority = policy.priority.map_or_else(String::new, |priority| format!(", priority {priority}"));
        screen.line("Tier", &format!("{}{priority}", policy.tier));
        screen.line("Subject", &policy.subject);
        screen.line("Isolates", &or_none(&policy.isolates));
        screen.line("Rules", &format!("{} ingress, {} egress", policy.ingress_rules, policy.egress_rules));
        screen.line("Written at", &format!("{}:{}", policy.file, policy.line));
        endpoints_of(&mut screen, "Selects", endpoints, style);
    }
    screen.finish()
}

pub(crate) fn namespace(d: &NamespaceDetails, style: &Style) -> String {
    let mut screen = Screen::new(style);
    screen.line("Namespace", &d.namespace.name);
    let labels: Vec<String> = d.namespace.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    screen.line("Labels", &or_none(&labels));
    let policies: Vec<String> = d.policies.iter().map(|p| format!("{} {}", p.kind, p.name)).collect();
    screen.line("Policies", &or_none(&policies));
    endpoints_of(&mut screen, "Endpoints", &d.endpoints, style);
    screen.finish()
}

fn endpoints_of(screen: &mut Screen<'_>, key: &str, endpoints: &[Endpoint], style: &Style) {
    if endpoints.is_empty() {
        screen.line(key, "no endpoint of this node");
    } else {
        screen.heading(&format!("{key}:"));
        screen.block(&endpoint::list(endpoints, style, Columns::default()));
    }
}

fn or_none(all: &[String]) -> String {
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use wharf_api::{EndpointState, LogStatus};

    use super::*;
    use crate::render::sample::{self, NOW};

    fn policy() -> PolicyInfo {
        PolicyInfo {
            kind: "NetworkPolicy".to_owned(),
            namespace: Some("shop".to_owned()),
            name: "db".to_owned(),
            tier: "namespaced".to_owned(),
            priority: None,
            subject: "k8s:app=db, in namespace shop".to_owned(),
            isolates: vec!["ingress".to_owned()],
            ingress_rules: 1,
            egress_rules: 0,
            file: "db.yaml".to_owned(),
            line: 4,
            endpoints: vec![7],
        }
    }

    #[test]
    fn an_endpoint_with_its_policies_and_events() {
        let details = EndpointDetails {
            endpoint: sample::endpoint(),
            redirects: Vec::new(),
            policies: Some(EndpointPolicies { ingress: vec!["NetworkPolicy shop/db".to_owned()], egress: Vec::new() }),
            events: vec![EndpointLogEntry {
                time_unix_ms: NOW,
                status: LogStatus::Ok,
                state: EndpointState::Ready,
                event: "created".to_owned(),
                message: "in 2.1 ms".to_owned(),
            }],
        };
        let text = endpoint(&details, &Style::plain());
        let (_, rest) = text.split_once("Created:").expect("the screen of `get` comes first");
        let (_, rest) = rest.split_once('\n').expect("a line");
        insta::assert_snapshot!(rest, @r"
        Ingress policies:   NetworkPolicy shop/db
        Egress policies:    none

        Events:
        TIME                      STATUS  STATE  EVENT    MESSAGE
        2026-10-01T12:00:00.000Z  ok      ready  created  in 2.1 ms
        ");
    }

    #[test]
    fn policies_with_the_endpoints_that_they_select() {
        let all = [
            PolicyDetails { policy: policy(), endpoints: vec![sample::endpoint()] },
            PolicyDetails {
                policy: PolicyInfo {
                    kind: "ClusterNetworkPolicy".to_owned(),
                    namespace: None,
                    tier: "admin".to_owned(),
                    priority: Some(10),
                    isolates: Vec::new(),
                    endpoints: Vec::new(),
                    ..policy()
                },
                endpoints: Vec::new(),
            },
        ];
        insta::assert_snapshot!(policies(&all, &Style::plain()), @r"
        Policy:             NetworkPolicy shop/db
        Tier:               namespaced
        Subject:            k8s:app=db, in namespace shop
        Isolates:           ingress
        Rules:              1 ingress, 0 egress
        Written at:         db.yaml:4
        Selects:
        ID  STATE  IDENTITY  POD            CONTAINER      IFNAME  IPV4       IPV6
         7  ready     65537  default/web-1  3f9c51aa01b2d  eth0    10.88.0.7  fd00:88::7

        Policy:             ClusterNetworkPolicy db
        Tier:               admin, priority 10
        Subject:            k8s:app=db, in namespace shop
        Isolates:           none
        Rules:              1 ingress, 0 egress
        Written at:         db.yaml:4
        Selects:            no endpoint of this node
        ");
    }

    #[test]
    fn a_namespace_with_what_is_in_it() {
        let labels = BTreeMap::from([("team".to_owned(), "a".to_owned())]);
        let details = NamespaceDetails {
            namespace: Namespace { name: "shop".to_owned(), labels },
            policies: vec![policy()],
            endpoints: Vec::new(),
        };
        insta::assert_snapshot!(namespace(&details, &Style::plain()), @r"
        Namespace:          shop
        Labels:             team=a
        Policies:           NetworkPolicy db
        Endpoints:          no endpoint of this node
        ");
    }
}
