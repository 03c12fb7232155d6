//! Parses a query and finds its subjects.

use std::net::IpAddr;

use wharf_core::{
    endpoint::parse_host_ifname,
    ids::{Attachment, ContainerId, EndpointId, Epoch},
    store::OutOfService,
    timeline::PastLife,
};
use wharf_handover::queue::Deletion;

use crate::{
    addresses::Addresses,
    endpoint::out_of_service,
    node::{endpoint::Handle, endpoints::Endpoints, leftovers::Orphan, registry::Registry},
};

/// Bytes; fits several container ids and interface names.
const MAX_SUBJECT: usize = 600;

/// Query subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// `7`
    Number(EndpointId),
    /// `10.87.0.9`
    Address(IpAddr),
    /// `wh00070000002a`: host side of a link; low half of the epoch.
    Link(EndpointId, u32),
    /// `3f9c51aa`: container id or its beginning, pod or sandbox; optional interface.
    Container(String, Option<String>),
    /// `pod-name:default/web`
    Pod(Option<String>, String),
}

const FORMS: &str = "it is an endpoint's number, an address, a sandbox's name, a container id or the beginning of one \
    (with /INTERFACE if it has several), pod-name:[NAMESPACE/]NAME, or the name of a link (wh...)";

/// Why a query is rejected, with its first characters.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    /// Empty or too long.
    #[error("read subject {0:?}: it must have 1 to {MAX_SUBJECT} bytes; {FORMS}")]
    Length(String),
    /// Unknown form, and why.
    #[error("read subject {0:?}: {1}; {FORMS}")]
    Form(String, &'static str),
}

/// Parses a query.
pub fn parse(text: &str) -> Result<Subject, SubjectError> {
    let shown = || text.chars().take(80).collect();
    let bad = |why| Err(SubjectError::Form(shown(), why));
    if text.is_empty() || text.len() > MAX_SUBJECT {
        return Err(SubjectError::Length(shown()));
    }
    if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return bad("it has blanks or control characters");
    }
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(Subject::Address(ip));
    }
    if let Some(Ok(ip)) = text.strip_suffix("/32").or(text.strip_suffix("/128")).map(str::parse::<IpAddr>) {
        return Ok(Subject::Address(ip));
    }
    // A larger one may begin a container id.
    if text.bytes().all(|b| b.is_ascii_digit())
        && let Ok(id) = text.parse()
    {
        return Ok(Subject::Number(id));
    }
    if let Some((id, low)) = parse_host_ifname(text) {
        return Ok(Subject::Link(id, low));
    }
    let (prefix, rest) = text.split_once(':').unwrap_or(("", text));
    let address = |rest: &str| rest.parse().map(Subject::Address).or_else(|_| bad("that is no address"));
    let container = |id: &str, ifname: Option<&str>| {
        let is_name = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_graphic() && b != b'/');
        if !is_name(id) || !ifname.is_none_or(is_name) {
            return bad("that is no container id");
        }
        Ok(Subject::Container(id.to_owned(), ifname.map(str::to_owned)))
    };
    match prefix {
        "ipv4" | "ipv6" => address(rest),
        "container-id" => container(rest, None),
        "cni-attachment-id" => match rest.split_once(':') {
            Some((id, ifname)) => container(id, Some(ifname)),
            None => bad("the interface's name is missing"),
        },
        "pod-name" => match rest.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
                Ok(Subject::Pod(Some(namespace.to_owned()), name.to_owned()))
            }
            None if !rest.is_empty() => Ok(Subject::Pod(None, rest.to_owned())),
            _ => bad("the pod's name is missing"),
        },
        _ if !prefix.is_empty() => match prefix.split_once('/') {
            Some((_, id)) => container(id, Some(rest)),
            None => bad("that prefix is not known"),
        },
        _ => match text.split_once('/') {
            Some((id, ifname)) => container(id, Some(ifname)),
            None => container(text, None),
        },
    }
}

/// Weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    Beginning,
    Name,
    Whole,
}

fn fit_container(container: &ContainerId, text: &str) -> Option<Fit> {
    match container.as_str() {
        whole if whole == text => Some(Fit::Whole),
        _ if container.sandbox_name() == Some(text) => Some(Fit::Name),
        // A sandbox's name must be whole.
        longer if longer.starts_with(text) && container.sandbox_name().is_none_or(|name| text.len() > name.len()) => {
            Some(Fit::Beginning)
        }
        _ => None,
    }
}

struct Names<'a> {
    id: EndpointId,
    epoch: Epoch,
    attachment: Option<&'a Attachment>,
    addresses: &'a [IpAddr],
    pod: (Option<&'a str>, Option<&'a str>),
}

impl Subject {
    fn fit(&self, n: &Names<'_>) -> Option<Fit> {
        let whole = |yes: bool| yes.then_some(Fit::Whole);
        match self {
            Self::Number(id) => whole(n.id == *id),
            Self::Address(ip) => whole(n.addresses.contains(ip)),
            Self::Link(id, low) => whole(n.id == *id && n.epoch.0 & 0xffff_ffff == u64::from(*low)),
            Self::Pod(namespace, name) => {
                whole(n.pod.1 == Some(name) && (namespace.is_none() || n.pod.0 == namespace.as_deref()))
            }
            Self::Container(id, ifname) => {
                let a = n.attachment?;
                if ifname.as_deref().is_some_and(|i| i != a.ifname.as_str()) {
                    return None;
                }
                fit_container(&a.container_id, id).max((n.pod.1 == Some(id)).then_some(Fit::Name))
            }
        }
    }
}

/// Objects that a subject names.
pub struct Found {
    /// Existing endpoints.
    pub living: Vec<Handle>,
    /// Endpoints whose records were lost.
    pub orphans: Vec<Orphan>,
    /// Records out of service, with attachment.
    pub out_of_service: Vec<(OutOfService, Option<Attachment>)>,
    /// Ended lives, the latest first.
    pub past: Vec<PastLife>,
}

/// Best matches, also for the REST API.
#[must_use]
pub fn living(registry: &Registry, subject: &Subject) -> Vec<Handle> {
    let all = fitting(registry, subject);
    best_of(best(&all), all)
}

fn fitting(registry: &Registry, subject: &Subject) -> Vec<(Fit, Handle)> {
    let fits = registry.list().into_iter().filter_map(|h| {
        let fit = h.shared.read(|v| {
            let addresses: Vec<IpAddr> = v.record.addresses().collect();
            subject.fit(&Names {
                id: v.record.id,
                epoch: v.record.epoch,
                attachment: Some(&v.record.attachment),
                addresses: &addresses,
                pod: (v.record.pod_namespace.as_deref(), v.record.pod_name.as_deref()),
            })
        })?;
        Some((fit, h))
    });
    fits.collect()
}

/// Best matching deletion record.
#[must_use]
pub fn deletion<'a>(records: &'a [Deletion], subject: &Subject) -> Option<&'a Deletion> {
    let Subject::Container(text, ifname) = subject else { return None };
    let of_interface = records.iter().filter(|d| ifname.as_ref().is_none_or(|i| *i == d.ifname));
    let fit = |d: &Deletion| fit_container(&ContainerId::parse(&d.container_id).ok()?, text);
    of_interface.filter_map(|d| fit(d).map(|fit| (fit, d))).max_by_key(|(fit, _)| *fit).map(|(_, d)| d)
}

/// Best matches of all kinds, from memory. A whole name, even of an ended life, wins over longer ones.
#[must_use]
pub fn find(endpoints: &Endpoints, addresses: &Addresses, subject: &Subject) -> Found {
    let living = fitting(&endpoints.registry, subject);
    let orphans = endpoints.leftovers.orphans.list().into_iter().filter_map(|o| {
        let addresses: Vec<IpAddr> = o.rows.iter().map(|(ip, _)| *ip).collect();
        let names = Names {
            id: o.link.id,
            epoch: o.link.epoch,
            attachment: o.attachment.as_ref(),
            addresses: &addresses,
            pod: (None, None),
        };
        subject.fit(&names).map(|fit| (fit, o))
    });
    let orphans: Vec<_> = orphans.collect();
    let out_of_service = endpoints.leftovers.out_of_service.list().into_iter().filter_map(|q| {
        let record = out_of_service::record_of(&q);
        let attachment = out_of_service::attachment_of(addresses, &q);
        let names = Names {
            id: q.id,
            epoch: record.as_ref().map_or(Epoch(u64::MAX), |r| r.epoch),
            attachment: attachment.as_ref(),
            addresses: &q.addresses,
            pod: record.as_ref().map_or((None, None), |r| (r.pod_namespace.as_deref(), r.pod_name.as_deref())),
        };
        subject.fit(&names).map(|fit| (fit, (q, attachment)))
    });
    let out_of_service: Vec<_> = out_of_service.collect();
    let past_fit = |p: &PastLife| {
        subject.fit(&Names {
            id: p.who.id,
            epoch: p.who.epoch,
            attachment: Some(&p.who.attachment),
            addresses: &p.who.addresses,
            pod: (p.who.pod_namespace.as_deref(), p.who.pod_name.as_deref()),
        })
    };
    let past = endpoints.timelines.past(|p| past_fit(p).is_some());
    let past: Vec<_> = past.into_iter().filter_map(|p| past_fit(&p).map(|fit| (fit, p))).collect();
    let most = best(&living).max(best(&orphans)).max(best(&out_of_service)).max(best(&past));
    Found {
        living: best_of(most, living),
        orphans: best_of(most, orphans),
        out_of_service: best_of(most, out_of_service),
        past: best_of(most, past),
    }
}

fn best<T>(all: &[(Fit, T)]) -> Option<Fit> {
    all.iter().map(|(fit, _)| *fit).max()
}

fn best_of<T>(best: Option<Fit>, all: Vec<(Fit, T)>) -> Vec<T> {
    all.into_iter().filter(|(fit, _)| Some(*fit) == best).map(|(_, t)| t).collect()
}

/// Similar names, most similar first.
#[must_use]
pub fn near(registry: &Registry, subject: &Subject, most: usize) -> Vec<(String, String)> {
    let mut ranked: Vec<(usize, String, String)> = Vec::new();
    for handle in registry.list() {
        handle.shared.read(|v| {
            let r = &v.record;
            let container = r.attachment.container_id.as_str();
            let distance = match subject {
                Subject::Number(id) | Subject::Link(id, _) => usize::from(r.id.get().abs_diff(id.get())),
                Subject::Address(_) => return,
                Subject::Container(text, _) | Subject::Pod(_, text) => {
                    let same = container.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
                    let in_pod = r.pod_name.as_deref().is_some_and(|p| p.contains(text.as_str()));
                    if same < 3 && !in_pod && !container.contains(text.as_str()) {
                        return;
                    }
                    text.len().saturating_sub(same)
                }
            };
            ranked.push((distance, r.id.to_string(), format!("endpoint {}, {}", r.id, r.attachment)));
        });
    }
    ranked.sort();
    ranked.into_iter().take(most).map(|(_, subject, what)| (subject, what)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_parses() {
        let container = |id: &str, ifname: Option<&str>| Ok(Subject::Container(id.into(), ifname.map(Into::into)));
        let id = |n: u16| EndpointId::try_from(n).expect("id");
        assert_eq!(parse("7"), Ok(Subject::Number(id(7))));
        assert_eq!(parse("10.0.0.1"), Ok(Subject::Address("10.0.0.1".parse().expect("address"))));
        assert_eq!(parse("ipv6:fd00::1"), Ok(Subject::Address("fd00::1".parse().expect("address"))));
        assert_eq!(parse("wh00070000002a"), Ok(Subject::Link(id(7), 0x2a)));
        assert_eq!(parse("3f9c51aa01b2"), container("3f9c51aa01b2", None));
        assert_eq!(parse("123456"), container("123456", None), "more digits than an endpoint's number has");
        assert_eq!(parse("16384"), container("16384", None), "beyond the numbers of endpoints");
        assert_eq!(parse("10.0.0.1/32"), parse("10.0.0.1"), "as results of CNI print it");
        assert_eq!(parse("fd00::1/128"), parse("fd00::1"));
        assert_eq!(parse("web/eth0"), container("web", Some("eth0")));
        assert_eq!(parse("cni-attachment-id:web:eth0"), container("web", Some("eth0")));
        assert_eq!(parse("net/web:eth0"), container("web", Some("eth0")), "as messages print it");
        assert_eq!(parse("container-id:7"), container("7", None));
        assert_eq!(parse("pod-name:default/web"), Ok(Subject::Pod(Some("default".into()), "web".into())));
    }

    #[test]
    fn the_whole_name_of_a_sandbox_wins_over_the_beginning_of_an_id() {
        let fit = |id: &str, text| fit_container(&ContainerId::parse(id).expect("an id"), text);
        assert_eq!(fit("web-0a1b2c3d", "web"), Some(Fit::Name));
        assert_eq!(fit("web2-0a1b2c3d", "web"), None, "a sandbox of another name");
        assert_eq!(fit("web-api-0a1b2c3d", "web"), None);
        assert_eq!(fit("web-api-0a1b2c3d", "web-api-0"), Some(Fit::Beginning));
        assert_eq!(fit("web-0a1b2c3d", "web-0a1b2c3d"), Some(Fit::Whole));
        assert_eq!(fit("web-0a1b2c3d", "web-0a"), Some(Fit::Beginning));
        assert_eq!(fit("web-0a1b2c3d", "b-0a"), None);
        assert_eq!(fit("web-1", "web"), Some(Fit::Beginning));
        assert_eq!(fit("web-0A1B2C3D", "web"), Some(Fit::Beginning));
        let all = vec![(Fit::Beginning, "web2"), (Fit::Name, "web")];
        assert_eq!(best_of(best(&all), all), ["web"]);
        let record = |container_id: &str| Deletion {
            version: 1,
            network: "front".into(),
            container_id: container_id.into(),
            ifname: "eth0".into(),
            endpoint: None,
            boot_id: String::new(),
            written_unix_ms: 0,
            canary: None,
        };
        let records = [record("web2-0a1b2c3d"), record("web-0a1b2c3d"), record("web3-0a1b2c3d")];
        let named = |text| deletion(&records, &parse(text).expect("a subject")).map(|d| d.container_id.as_str());
        assert_eq!((named("web"), named("db")), (Some("web-0a1b2c3d"), None));
        assert_eq!(named("web/eth1"), None);
    }

    #[test]
    fn hostile_words_are_refused_and_not_echoed_whole() {
        let long = "a".repeat(100_000);
        for text in [
            "",
            "a b",
            "a\nb",
            "a\u{1b}[2J",
            "/",
            "a/",
            "/b",
            "pod-name:",
            "pod-name:/",
            "nope:x",
            "container-id:",
            "cni-attachment-id:x",
            "ipv4:nope",
            "a/b/c",
            "ä",
            long.as_str(),
        ] {
            let why = parse(text).expect_err(text).to_string();
            assert!(why.len() < 700, "{}", why.len());
            assert!(!why.contains('\u{1b}') && !why.contains('\n'), "{why:?}");
        }
    }
}
