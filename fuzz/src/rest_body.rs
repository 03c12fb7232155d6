//! The agent's REST edge, with the extractors of the handlers. The first byte, from `0` on, selects a case of [`run`].

use std::{fmt::Debug, future::Future};

use axum::{
    body::Body as Bytes,
    extract::{FromRequest, FromRequestParts},
    http::{Request, header::CONTENT_TYPE},
};
use serde::{Serialize, de::DeserializeOwned};
use wharf_agent::endpoint::create::External;
use wharf_agent::explain::subject::Subject;
use wharf_agent::rest::{
    error::{Body, Failure, Query},
    id::{self, IdRef},
    ipam::OwnerQuery,
    parse::create_spec,
};
use wharf_api::{
    AgentConfigPatch, AgentStatus, ApiError, AuditReport, DeleteQuery, DeleteResult, Endpoint, EndpointCreate,
    EndpointFilter, EndpointPatch, ErrorCode, GcRequest, IpamAllocate, IpamView, MonitorEvent,
};

/// Maximum bytes of a refusal's message.
const MAX_MESSAGE: usize = 1200;

/// Reads a request or an answer.
pub fn run(data: &[u8]) {
    let Some((first, rest)) = data.split_first() else { return };
    match first.wrapping_sub(b'0') % 16 {
        0 => create(rest),
        1 => drop(body::<EndpointPatch>(rest)),
        2 => drop(body::<GcRequest>(rest)),
        3 => drop(body::<IpamAllocate>(rest)),
        4 => drop(body::<AgentConfigPatch>(rest)),
        5 => text(rest).map_or((), endpoint_id),
        6 => drop(text(rest).and_then(parameters::<EndpointFilter>)),
        7 => drop(text(rest).and_then(parameters::<DeleteQuery>)),
        8 => drop(text(rest).and_then(parameters::<OwnerQuery>)),
        // The agent's answers, as shim and command line read them.
        9 => answer::<ApiError>(rest),
        10 => answer::<Endpoint>(rest),
        11 => answer::<DeleteResult>(rest),
        12 => answer::<AgentStatus>(rest),
        13 => answer::<AuditReport>(rest),
        14 => answer::<IpamView>(rest),
        _ => answer::<MonitorEvent>(rest),
    }
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

/// The first line is the path's id; the body follows.
fn create(data: &[u8]) {
    let (lines, bytes) = crate::head(data, 1);
    let Some(id) = text(lines[0]) else { return };
    let Some(asked) = body::<EndpointCreate>(bytes) else { return };
    let spec = match create_spec(id, asked.clone()) {
        Ok(spec) => spec,
        Err(failure) => {
            return refused(&failure, &["create endpoint", "read endpoint id", "read subject", "read labels"]);
        }
    };
    let attachment = (&asked.network, &asked.container_id, &asked.ifname);
    let taken =
        (spec.attachment.network.as_str(), spec.attachment.container_id.as_str(), spec.attachment.ifname.as_str());
    assert_eq!(taken, (attachment.0.as_str(), attachment.1.as_str(), attachment.2.as_str()));
    assert_eq!(id, format!("cni-attachment-id:{}:{}", asked.container_id, asked.ifname));
    assert_eq!(spec.netns.to_str(), Some(asked.netns.as_str()));
    assert_eq!(spec.mtu, asked.mtu);
    assert_eq!(spec.pool.map(String::from), asked.pool);
    assert_eq!(spec.mac.map(|mac| mac.to_string()), asked.mac.map(|mac| mac.to_ascii_lowercase()));
    assert_eq!((spec.ips, spec.pod_name, spec.pod_namespace), (asked.ips, asked.pod_name, asked.pod_namespace));
    let external = match asked.ipam {
        Some(plugin) => Some(External::Ipam { plugin, gateways: asked.gateways }),
        None => asked.chained.then_some(External::Chain),
    };
    assert_eq!(spec.external, external);
    assert_eq!(spec.routes, asked.routes);
    for label in &spec.labels {
        assert_eq!(label.to_string().parse().as_ref(), Ok(label), "a label is not read back");
        assert_ne!(label.source, "reserved", "a caller names itself one of the node's own");
    }
    // Labels as the agent writes them.
    let labels: Vec<String> = spec.labels.iter().map(ToString::to_string).collect();
    assert!(labels.len() <= asked.labels.len());
    let again = create_spec(id, EndpointCreate { labels, ..minimal(&spec.attachment) });
    assert_eq!(again.expect("what was accepted is accepted").labels, spec.labels);
}

fn minimal(attachment: &wharf_core::ids::Attachment) -> EndpointCreate {
    EndpointCreate {
        container_id: attachment.container_id.to_string(),
        ifname: attachment.ifname.to_string(),
        network: attachment.network.to_string(),
        netns: "/run/netns/x".into(),
        pool: None,
        mtu: None,
        mac: None,
        ips: Vec::new(),
        labels: Vec::new(),
        pod_name: None,
        pod_namespace: None,
        runtime: None,
        deadline_ms: None,
        ports: Vec::new(),
        masquerade: None,
        ipam: None,
        gateways: Vec::new(),
        routes: None,
        bandwidth: Default::default(),
        source_prefixes: Vec::new(),
        chained: false,
    }
}

/// A request's body.
fn body<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
    let read = |bytes: &[u8]| {
        let request = Request::post("/").header(CONTENT_TYPE, "application/json").body(Bytes::from(bytes.to_vec()));
        now(Body::<T>::from_request(request.expect("a request"), &())).map(|Body(value)| value)
    };
    match read(bytes) {
        Ok(value) => {
            let written = serde_json::to_vec(&value).expect("a body can be written");
            let again = read(&written).expect("a body that was written is read");
            assert_eq!(again, value, "a body changes on its way");
            Some(value)
        }
        Err(failure) => {
            refused(&failure, &["read body"]);
            None
        }
    }
}

fn parameters<T: DeserializeOwned + Debug>(query: &str) -> Option<T> {
    let uri = format!("/?{query}").parse::<axum::http::Uri>().ok()?;
    let (mut parts, ()) = Request::get(uri).body(()).ok()?.into_parts();
    match now(Query::<T>::from_request_parts(&mut parts, &())) {
        Ok(Query(value)) => Some(value),
        Err(failure) => {
            refused(&failure, &["read query"]);
            None
        }
    }
}

/// An id has one meaning, and each meaning has a spelling.
fn endpoint_id(text: &str) {
    let found = match id::parse(text) {
        Ok(found) => found,
        Err(failure) => return refused(&failure, &["read endpoint id", "read subject"]),
    };
    let spelling = match &found {
        IdRef::Number(id) => id.to_string(),
        IdRef::Container(id) => format!("container-id:{id}"),
        IdRef::Attachment(id, ifname) => format!("cni-attachment-id:{id}:{ifname}"),
        IdRef::Pod(Some(namespace), name) => format!("pod-name:{namespace}/{name}"),
        IdRef::Pod(None, name) => format!("pod-name:{name}"),
        IdRef::Ip(ip) => format!("{}:{ip}", if ip.is_ipv4() { "ipv4" } else { "ipv6" }),
        IdRef::Name(subject) => name(subject),
    };
    assert_eq!(id::parse(&spelling).ok().as_ref(), Some(&found), "{spelling:?} is not {text:?}");
}

fn name(subject: &Subject) -> String {
    match subject {
        Subject::Number(id) => id.to_string(),
        Subject::Address(ip) => ip.to_string(),
        Subject::Link(id, low) => format!("wh{:04x}{low:08x}", id.get()),
        Subject::Container(id, None) => id.clone(),
        Subject::Container(id, Some(ifname)) => {
            // Not longer than `text`, which may have the maximum length. An address as id is another subject.
            let plain = format!("{id}/{ifname}");
            let is_it = id::parse(&plain).is_ok_and(|found| found == IdRef::Name(subject.clone()));
            if is_it { plain } else { format!("/{id}:{ifname}") }
        }
        Subject::Pod(..) => panic!("a pod is asked for with a prefix: {subject:?}"),
    }
}

fn answer<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<T>(bytes) else { return };
    let written = serde_json::to_vec(&value).expect("an answer can be written");
    assert_eq!(serde_json::from_slice::<T>(&written).ok().as_ref(), Some(&value), "an answer changes on its way");
}

/// A refusal is the client's fault, names the operation, and quotes little.
fn refused(failure: &Failure, operations: &[&str]) {
    let ApiError { code, message, .. } = &failure.0;
    assert!(matches!(code, ErrorCode::InvalidRequest | ErrorCode::InvalidNetns), "{code:?}: {message}");
    assert!(operations.iter().any(|operation| message.starts_with(operation)), "{message}");
    assert!(message.len() <= MAX_MESSAGE, "a message of {} bytes: {message}", message.len());
}

/// The body is complete, so nothing waits.
fn now<T>(work: impl Future<Output = T>) -> T {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    }
    RUNTIME.with(|runtime| runtime.block_on(work))
}
