//! Names of an endpoint. Runtimes use exact ones: numbers and prefixed names. Others are resolved as in `wharf
//! explain`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use utoipa::openapi::{
    OpenApi, RefOr,
    path::ParameterIn,
    schema::{ObjectBuilder, Type},
};
use wharf_api::ErrorCode;
use wharf_core::ids::{ContainerId, EndpointId, IfName};

use crate::{
    explain::subject::{self, Subject},
    node::{endpoint::Handle, registry::Registry},
    rest::error::Failure,
};

/// A parsed id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdRef {
    /// `7`
    Number(EndpointId),
    /// `container-id:abc`: its only endpoint.
    Container(ContainerId),
    /// `cni-attachment-id:abc:eth0`
    Attachment(ContainerId, IfName),
    /// `pod-name:default/web` or `pod-name:web`
    Pod(Option<String>, String),
    /// `ipv4:10.0.0.7`, `ipv6:fd00::7`
    Ip(IpAddr),
    /// `10.0.0.7`, `3f9c51aa`, `3f9c51aa/eth1`, `wh00070000002a`, `web`: address, container id or its beginning, host
    /// side, pod.
    Name(Subject),
}

const PREFIXES: [&str; 5] = ["container-id", "cni-attachment-id", "pod-name", "ipv4", "ipv6"];
const ID_PATTERN: &str = "^([0-9]{1,5}|(container-id|cni-attachment-id|pod-name|ipv4|ipv6):.+|[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?)$";
const MAP_PATTERN: &str = "^[A-Za-z0-9_./]+$";
const FORMS: &str = "an id is a number, container-id:ID, cni-attachment-id:ID:IFNAME, pod-name:[NAMESPACE/]NAME, ipv4:ADDRESS or ipv6:ADDRESS; \
    or, if that fits one endpoint, an address, a container id or its beginning (with /IFNAME), a pod's name or the name of the link's host side";
const MAX_LISTED: usize = 8;

/// Parses an id.
///
/// # Errors
/// 400 with the forms.
pub fn parse(text: &str) -> Result<IdRef, Failure> {
    let bad = |why: String| Failure::new(ErrorCode::InvalidRequest, format!("read endpoint id: {why}")).hint(FORMS);
    let shown: String = text.chars().take(80).collect();
    let Some((prefix, rest)) = text.split_once(':').filter(|(prefix, _)| PREFIXES.contains(prefix)) else {
        let name = |why: subject::SubjectError| Failure::new(ErrorCode::InvalidRequest, why.to_string());
        return match subject::parse(text).map_err(name)? {
            Subject::Number(id) => Ok(IdRef::Number(id)),
            other => Ok(IdRef::Name(other)),
        };
    };
    match prefix {
        "container-id" => ContainerId::parse(rest).map(IdRef::Container).map_err(|e| bad(e.to_string())),
        "cni-attachment-id" => {
            let (container, ifname) =
                rest.split_once(':').ok_or_else(|| bad(format!("{shown:?} lacks the interface name")))?;
            let container = ContainerId::parse(container).map_err(|e| bad(e.to_string()))?;
            Ok(IdRef::Attachment(container, IfName::parse(ifname).map_err(|e| bad(e.to_string()))?))
        }
        "pod-name" => match rest.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() => {
                Ok(IdRef::Pod(Some(namespace.to_owned()), name.to_owned()))
            }
            None if !rest.is_empty() => Ok(IdRef::Pod(None, rest.to_owned())),
            _ => Err(bad(format!("{shown:?} lacks the pod's name"))),
        },
        "ipv4" => rest.parse::<Ipv4Addr>().map(|a| IdRef::Ip(a.into())).map_err(|e| bad(format!("{shown:?}: {e}"))),
        _ => rest.parse::<Ipv6Addr>().map(|a| IdRef::Ip(a.into())).map_err(|e| bad(format!("{shown:?}: {e}"))),
    }
}

/// Finds the endpoint.
///
/// # Errors
/// 404 for none, 409 for several.
pub fn find(registry: &Registry, id: &IdRef, text: &str) -> Result<Handle, Failure> {
    let matches: Vec<Handle> = match id {
        IdRef::Number(id) => registry.get(*id).into_iter().collect(),
        IdRef::Attachment(container, ifname) => registry.by_interface(container, ifname).into_iter().collect(),
        IdRef::Container(container) => select(registry, |r| r.attachment.container_id == *container),
        IdRef::Pod(namespace, name) => select(registry, |r| {
            r.pod_name.as_ref() == Some(name) && (namespace.is_none() || r.pod_namespace == *namespace)
        }),
        IdRef::Ip(ip) => select(registry, |r| r.addresses().any(|a| a == *ip)),
        IdRef::Name(subject) => subject::living(registry, subject),
    };
    let shown: String = text.chars().take(300).collect();
    match matches.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Failure::new(ErrorCode::NotFound, format!("find endpoint {shown}: no such endpoint"))
            .hint("`wharf endpoint list` shows those that are there")),
        many => {
            let what = |h: &Handle| format!("{} ({})", h.id, h.shared.read(|v| v.record.attachment.to_string()));
            let listed: Vec<String> = many.iter().take(MAX_LISTED).map(what).collect();
            let more = if many.len() > listed.len() { ", ..." } else { "" };
            let message = format!("find endpoint {shown}: {} endpoints fit: {}{more}", many.len(), listed.join(", "));
            Err(Failure::new(ErrorCode::Exists, message).hint("use the number, or cni-attachment-id:ID:IFNAME"))
        }
    }
}

fn select(registry: &Registry, fits: impl Fn(&wharf_core::endpoint::EndpointRecord) -> bool) -> Vec<Handle> {
    registry.list().into_iter().filter(|h| h.shared.read(|v| fits(&v.record))).collect()
}

/// Describes the document's path parameters.
pub fn describe(document: &mut OpenApi) {
    for (path, item) in &mut document.paths.paths {
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch];
        for operation in operations.into_iter().flatten() {
            for parameter in operation.parameters.iter_mut().flatten() {
                let RefOr::T(parameter) = parameter else { continue };
                if !matches!(parameter.parameter_in, ParameterIn::Path) {
                    continue;
                }
                let (pattern, example, description) = match (parameter.name.as_str(), path.as_str()) {
                    ("id", _) => (ID_PATTERN, "cni-attachment-id:web:eth0", FORMS),
                    ("ip", _) => (r"^[0-9A-Fa-f:.]+$", "10.87.0.9", "an IPv4 or IPv6 address"),
                    ("name", "/v1/map/{name}") => {
                        (MAP_PATTERN, "ENDPOINTS", "a map as `GET /v1/map` names it, or with `.` for the `/`")
                    }
                    _ => continue,
                };
                parameter.description = Some(description.to_owned());
                let schema =
                    ObjectBuilder::new().schema_type(Type::String).pattern(Some(pattern)).examples([example]).build();
                parameter.schema = Some(schema.into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_parses() {
        let container = ContainerId::parse("c1").expect("an id");
        let ifname = IfName::parse("eth0").expect("a name");
        let part =
            |id: &str, ifname: Option<&str>| IdRef::Name(Subject::Container(id.to_owned(), ifname.map(str::to_owned)));
        for (text, meant) in [
            ("7", IdRef::Number(EndpointId::try_from(7).expect("an id"))),
            ("container-id:c1", IdRef::Container(container.clone())),
            ("cni-attachment-id:c1:eth0", IdRef::Attachment(container, ifname)),
            ("pod-name:web", IdRef::Pod(None, "web".into())),
            ("pod-name:default/web", IdRef::Pod(Some("default".into()), "web".into())),
            ("ipv4:10.0.0.1", IdRef::Ip([10, 0, 0, 1].into())),
            ("ipv6:fd00::1", IdRef::Ip([0xfd00, 0, 0, 0, 0, 0, 0, 1_u16].into())),
            ("10.0.0.1", IdRef::Name(Subject::Address([10, 0, 0, 1].into()))),
            ("fd00::1", IdRef::Name(Subject::Address([0xfd00, 0, 0, 0, 0, 0, 0, 1_u16].into()))),
            ("wh00070000002a", IdRef::Name(Subject::Link(EndpointId::try_from(7).expect("an id"), 42))),
            ("3f9c51aa", part("3f9c51aa", None)),
            ("3f9c51aa/eth1", part("3f9c51aa", Some("eth1"))),
            ("16384", part("16384", None)),
            ("cni/3f9c51aa:eth1", part("3f9c51aa", Some("eth1"))),
        ] {
            assert_eq!(parse(text).expect(text), meant, "{text}");
        }
    }

    #[test]
    fn hostile_ids_are_refused_and_not_echoed_whole() {
        let long = format!("container-id:{}", "a".repeat(100_000));
        for text in [
            "",
            "a b",
            "a\u{1b}[2J",
            "nope:x",
            "container-id:",
            "container-id:../etc",
            "cni-attachment-id:c1",
            "cni-attachment-id:c1:0123456789abcdef",
            "cni-attachment-id:c1:a/b",
            "pod-name:",
            "pod-name:/",
            "ipv4:::1",
            "ipv6:1.2.3.4",
            long.as_str(),
        ] {
            let error = parse(text).expect_err(text);
            assert_eq!(error.0.code, ErrorCode::InvalidRequest);
            assert!(error.0.message.len() < 700, "{}", error.0.message.len());
        }
    }
}
