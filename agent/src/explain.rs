//! Explain: a report on an endpoint, a container or an address, from memory, store and kernel. Parts that miss their
//! deadline are named and omitted.

mod address;
mod cluster;
mod conclude;
pub mod links;
mod past;
pub mod subject;

use std::{sync::Arc, time::Duration};

use tokio::{sync::oneshot, time::timeout};
use wharf_api::{
    Candidate, Explanation, Fact, Health, HealthState, KernelLook, LogStatus, MetricRow, PastOwner, PolicyRedirect,
    SubjectKind, TimelineEntry, Wait,
};
use wharf_common::DropReason;
use wharf_core::{
    endpoint::EndpointRecord,
    finding::{Mender, Problem, Verdict, verdict},
    identity::Identity,
    ids::{Attachment, EndpointId},
    kernel::{CounterRow, KernelError, KernelErrorKind},
    state::State,
    timeline::{DELETE_BEGINS, End, Entries, Operation, Outcome, PastLife},
};
use wharf_handover::queue::{Deletion, Queue};
use wharf_kit::clock;

use self::{
    conclude::{Known, conclude, what_to_do},
    subject::{Found, Subject, SubjectError},
};
use crate::{
    endpoint, findings,
    node::{
        Node,
        endpoint::{Handle, View, api_endpoint},
        endpoints::Endpoints,
        health,
        looks::Purpose,
        queue::{Deletions, QueueFailure},
        sources,
    },
    proxy::Look,
};

/// Per source: kernel, store, deletion queue.
pub const DEADLINE: Duration = Duration::from_secs(2);
const BUILD_PATIENCE: Duration = Duration::from_secs(1);
const MAX_ERRORS: usize = 8;
const MAX_LISTED: usize = 16;

/// Explains the subject that `text` names.
pub async fn explain(node: &Arc<Node>, text: &str) -> Result<Explanation, SubjectError> {
    let subject = subject::parse(text)?;
    let mut found = subject::find(&node.life.endpoints, &node.life.network.addresses, &subject);
    let records = deletion_records(&node.life.endpoints.deletions).await;
    let mut answer = match (found.living.len(), found.orphans.len() + found.out_of_service.len()) {
        (1, _) => living(node, &found.living[0], &records).await,
        (0, 1) => past::out_of_service(node, &found).await,
        (0, 0) => match last_of_one(&found.past) {
            Some(last) if !matches!(subject, Subject::Address(_)) => past::past(node, &last).await,
            None if !found.past.is_empty() && !matches!(subject, Subject::Address(_)) => several(text, &found),
            _ => match &subject {
                Subject::Address(ip) => {
                    if let Some(feed) = node.life.network.cluster.feed() {
                        feed.restored().await;
                    }
                    address::explain(node, *ip).await
                }
                _ => nothing(&node.life.endpoints, node.life.config.timeline_keep, text, &subject, &records),
            },
        },
        _ => several(text, &found),
    };
    if answer.kind != SubjectKind::Several {
        let shown = (answer.kind == SubjectKind::PastEndpoint).then(|| last_of_one(&found.past)).flatten();
        found.past.retain(|p| Some(p) != shown.as_ref());
        answer.before = found.past.iter().take(MAX_LISTED).map(past_owner).collect();
    }
    Ok(answer)
}

fn blank(subject: String, kind: SubjectKind, health: Health, summary: String) -> Explanation {
    Explanation {
        subject,
        kind,
        health,
        summary,
        endpoint: None,
        facts: Vec::new(),
        waits: None,
        errors: Vec::new(),
        timeline: Vec::new(),
        left_out: 0,
        verdicts: Vec::new(),
        kernel: None,
        before: Vec::new(),
        candidates: Vec::new(),
        searched: Vec::new(),
    }
}

fn fact(name: &str, value: impl Into<String>) -> Fact {
    Fact { name: name.to_owned(), value: value.into() }
}

/// Requires one attachment, or one interface and one sandbox or pod.
fn last_of_one(past: &[PastLife]) -> Option<PastLife> {
    let last = past.first()?;
    let is_same = |p: &&PastLife| {
        let (who, whose) = (&p.who, &last.who);
        let sandbox = who.attachment.container_id.sandbox_name();
        let pod = (&who.pod_namespace, who.pod_name.as_ref());
        let is_of_name = sandbox.is_some() && sandbox == whose.attachment.container_id.sandbox_name()
            || pod.1.is_some() && pod == (&whose.pod_namespace, whose.pod_name.as_ref());
        who.attachment == whose.attachment || is_of_name && who.attachment.ifname == whose.attachment.ifname
    };
    past.iter().all(|p| is_same(&p)).then(|| last.clone())
}

fn asks_for(deletion: &Deletion, a: &Attachment) -> bool {
    deletion.canary.is_none()
        && deletion.network == a.network.as_str()
        && deletion.container_id == a.container_id.as_str()
        && deletion.ifname == a.ifname.as_str()
}

async fn deletion_records(queue: &Deletions) -> Result<Vec<Deletion>, Unknown> {
    match timeout(DEADLINE, queue.blocking(Queue::list)).await {
        Ok(Ok(entries)) => Ok(entries.into_iter().filter_map(|e| e.content.ok()).collect()),
        Ok(Err(why)) => Err(why.into()),
        Err(_) => Err(Unknown::QueueSilent),
    }
}

async fn living(node: &Arc<Node>, handle: &Handle, records: &Result<Vec<Deletion>, Unknown>) -> Explanation {
    let is_looked_at = |v: &View| v.committed && !v.fsm.state.is_terminal() && v.fsm.state != State::Disconnecting;
    let found = if handle.shared.read(is_looked_at) { Some(problems(node, handle).await) } else { None };
    let (view, entries) = (handle.shared.view(), handle.shared.entries());
    let r = &view.record;
    let now_ms = clock::unix_ms();
    let disconnecting = view.fsm.state == State::Disconnecting;
    let kernel = match &found {
        Some(found) => Some(kernel_look(found, &r.attachment.to_string())),
        None if disconnecting => Some(past::left_in_kernel(node, r.id, r.epoch, &r.attachment).await),
        None => None,
    };
    let record = records.as_ref().ok().and_then(|all| all.iter().find(|d| asks_for(d, &r.attachment)));
    let last_delete_error = entries.list().iter().rev().take_while(|e| e.phase != DELETE_BEGINS);
    let last_delete_error = last_delete_error.filter(|e| e.outcome == Outcome::Failed).map(|e| e.text.as_str()).next();
    let since_unix_ms = since(&view, &entries);
    let verdicts = counters(node, r.id).await;
    let in_anothers_name = in_anothers_name(verdicts.as_deref().unwrap_or_default());
    let known = Known {
        state: view.fsm.state,
        since_unix_ms,
        phase: &view.status.phase,
        waits: (&view.status.waits_for, &view.status.ends_when),
        last_error: if disconnecting { last_delete_error } else { view.status.last_error.as_deref() },
        kernel: match &found {
            Some(Ok(problems)) => Ok(problems),
            Some(Err(why)) => Err(why),
            None => Ok(&[]),
        },
        in_anothers_name: &in_anothers_name,
        to_be_deleted: record.is_some(),
        now_ms,
    };
    let (health, summary) = with_probes(&node.health, r, conclude(&known));
    let mut answer = blank(format!("endpoint {}", r.id), SubjectKind::Endpoint, health, summary);
    answer.facts.extend(what_to_do(&known, r.id).map(|text| fact("what to do", text)));
    answer.facts.extend(facts(&node.life.config.node_name, &view));
    answer.facts.extend(redirects(&node.life.policy.proxy.redirects.look(), r.id));
    let notices = found.iter().flatten().flatten().filter(|p| p.mender() == Mender::Nobody);
    answer.facts.extend(notices.map(|p| fact("notice", format!("{}; {}", findings::in_words(p), p.remedy()))));
    if let Some(record) = record {
        let waits = conclude::span(now_ms.saturating_sub(record.written_unix_ms));
        answer.facts.push(fact("deletion record", format!("waits for {waits}; written by a DEL that found no agent")));
    }
    if let Err(why) = records {
        answer.facts.push(fact("deletion queue", format!("could not be read: {why}")));
    }
    if !view.status.phase.is_empty() || !view.status.waits_for.is_empty() {
        let step = conclude::step_in_words(&view.status.phase);
        answer.waits = Some(Wait {
            waits_for: match step {
                Some(words) => format!("{words} (step {})", view.status.phase),
                None if view.status.waits_for.is_empty() => format!("step {}", view.status.phase),
                None => view.status.waits_for.clone(),
            },
            since_unix_ms: view.status.since_unix_ms,
            ends_when: view.status.ends_when.clone(),
        });
    }
    tell(&mut answer, &entries);
    answer.verdicts = match verdicts {
        Ok(rows) => rows,
        Err(why) => {
            answer.facts.push(fact("packet counters", format!("could not be read: {why}")));
            Vec::new()
        }
    };
    answer.kernel = kernel;
    answer.endpoint = Some(api_endpoint(&view, node.life.config.masquerade.is_some()));
    answer
}

/// The health endpoint's failing probes take precedence.
fn with_probes(probes: &health::Health, r: &EndpointRecord, concluded: (Health, String)) -> (Health, String) {
    let (health, summary) = concluded;
    let probed = probes.view();
    match probed.state {
        HealthState::Degraded | HealthState::WrongAnswer | HealthState::Down if health::is_reserved(&r.attachment) => {
            let amiss = format!("{}: {}", probed.state.as_str(), probed.message);
            (health.max(Health::Degraded), format!("its probes say {amiss}; as an endpoint it is {summary}"))
        }
        _ => (health, summary),
    }
}

fn since(view: &View, entries: &Entries) -> u64 {
    if view.fsm.state != State::Disconnecting {
        return view.status.since_unix_ms;
    }
    let begun = entries.list().iter().find(|e| e.operation == Operation::Delete);
    begun.map_or(view.status.since_unix_ms, |e| e.at_unix_ms)
}

fn facts(node_name: &str, view: &View) -> Vec<Fact> {
    let r = &view.record;
    let addresses: Vec<String> = r.addresses().map(|ip| ip.to_string()).collect();
    let leased_by = r.ipam.as_ref().map_or_else(String::new, |plugin| format!(", leased by IPAM plugin {plugin}"));
    let labels: Vec<String> = r.labels.iter().map(ToString::to_string).collect();
    let chained = !r.link_owner.is_wharf();
    let mut facts = vec![fact("attachment", r.attachment.to_string())];
    if r.identity == Identity::HEALTH {
        facts.push(fact("role", "the node's own health endpoint; `wharf health status` tells what its probes find"));
    }
    if let Some(pod) = &r.pod_name {
        facts.push(fact("pod", format!("{}/{pod}", r.pod_namespace.as_deref().unwrap_or("-"))));
    }
    facts.extend([
        fact("addresses", if addresses.is_empty() { "none yet".to_owned() } else { addresses.join(", ") + &leased_by }),
        fact("identity", named(r.identity)),
        fact("labels", if labels.is_empty() { "none".to_owned() } else { labels.join(", ") }),
        fact("epoch", r.epoch.to_string()),
        fact(
            "link",
            format!(
                "{} (index {}){}",
                r.host_ifname,
                r.host_ifindex,
                if chained { ", made by another plugin" } else { "" }
            ),
        ),
        fact("namespace", r.netns.path.display().to_string()),
        fact("node", node_name),
    ]);
    if !r.sources.is_empty() {
        facts.push(fact("sources", format!("its addresses, and {}", sources::in_words(&r.sources))));
    }
    facts
}

fn redirects(proxy: &Look, id: EndpointId) -> Vec<Fact> {
    let told = |(direction, PolicyRedirect { port, passes, problem, .. }): (String, PolicyRedirect)| {
        let problem = problem.map_or_else(String::new, |why| format!("; {why}"));
        fact("redirect", format!("{direction}, port {port} of the proxy: {}{problem}", passes.join("; ")))
    };
    proxy.of_endpoint(id).into_iter().map(told).collect()
}

fn named(identity: Identity) -> String {
    let name = match identity {
        Identity::HOST => "host",
        Identity::WORLD => "world",
        Identity::UNMANAGED => "unmanaged",
        Identity::HEALTH => "health",
        Identity::INIT => "init",
        Identity::REMOTE_NODE => "remote-node",
        Identity::UNKNOWN_POD => "unknown-pod",
        other => return other.to_string(),
    };
    format!("{identity} (reserved:{name})")
}

fn tell(answer: &mut Explanation, entries: &Entries) {
    answer.timeline = entries
        .list()
        .iter()
        .map(|e| TimelineEntry {
            time_unix_ms: e.at_unix_ms,
            operation: e.operation.name().to_owned(),
            phase: e.phase.clone(),
            took_us: e.took_us,
            outcome: match e.outcome {
                Outcome::Ok => LogStatus::Ok,
                Outcome::Warning => LogStatus::Warning,
                Outcome::Failed => LogStatus::Failure,
            },
            text: e.text.clone(),
        })
        .collect();
    answer.left_out = entries.left_out();
    answer.errors =
        answer.timeline.iter().rev().filter(|e| e.outcome == LogStatus::Failure).take(MAX_ERRORS).cloned().collect();
}

/// Within [`DEADLINE`], including the permit. A query continues without its caller.
async fn look<T: Send + 'static>(
    node: &Node,
    purpose: Purpose,
    work: impl Future<Output = Result<T, KernelError>> + Send + 'static,
) -> Result<T, Unknown> {
    let asked = async {
        let permit = node.looks.turn(purpose).await?;
        let (reply, answer) = oneshot::channel();
        node.life.tasks.operations.spawn(async move {
            let result = work.await;
            drop(permit);
            reply.send(result).ok(); // the caller may have given up
        });
        answer.await.ok()
    };
    match timeout(DEADLINE, asked).await {
        Ok(Some(result)) => Ok(result?),
        Ok(None) => Err(Unknown::Stopping),
        Err(_) => Err(Unknown::KernelSilent),
    }
}

#[derive(Debug, thiserror::Error)]
enum Unknown {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("the kernel did not answer within {DEADLINE:?}")]
    KernelSilent,
    #[error("the agent is stopping")]
    Stopping,
    #[error("a build of it runs or waits for its turn")]
    Build,
    #[error(transparent)]
    Queue(#[from] QueueFailure),
    #[error("list the deletion queue: no answer within {DEADLINE:?}")]
    QueueSilent,
}

async fn problems(node: &Arc<Node>, handle: &Handle) -> Result<Vec<Problem>, Unknown> {
    let (asked, handle) = (Arc::clone(&node.life.kernel), handle.clone());
    let work = async move { endpoint::look::settled(&*asked, &handle, BUILD_PATIENCE).await };
    let looked = look(node, Purpose::Explanation, work).await?;
    if looked.settled || verdict(&looked.problems) == Verdict::Well { Ok(looked.problems) } else { Err(Unknown::Build) }
}

fn kernel_look(problems: &Result<Vec<Problem>, Unknown>, owner: &str) -> KernelLook {
    match problems {
        Ok(problems) => KernelLook {
            could_not_look: None,
            findings: problems.iter().map(|p| findings::finding(p, Some(owner.to_owned()))).collect(),
        },
        Err(why) => KernelLook { could_not_look: Some(why.to_string()), findings: Vec::new() },
    }
}

async fn counters(node: &Node, id: EndpointId) -> Result<Vec<MetricRow>, Unknown> {
    let kernel = Arc::clone(&node.life.kernel);
    match look(node, Purpose::Explanation, async move { kernel.observe_counters(id).await }).await {
        Ok(rows) => Ok(rows.into_iter().map(|c| metric_row(id, c)).collect()),
        Err(Unknown::Kernel(e)) if e.kind == KernelErrorKind::NotFound => Ok(Vec::new()),
        Err(why) => Err(why),
    }
}

fn in_anothers_name(rows: &[MetricRow]) -> Vec<(String, u64)> {
    let reasons = [DropReason::InvalidSourceIp, DropReason::InvalidSourceMac, DropReason::NeighbourSpoof];
    let of = |reason: DropReason| {
        let sum: u64 = rows.iter().filter(|r| r.reason == reason.as_str()).map(|r| r.packets).sum();
        (sum > 0).then(|| (reason.as_str().to_owned(), sum))
    };
    reasons.into_iter().filter_map(of).collect()
}

fn metric_row(id: EndpointId, c: CounterRow) -> MetricRow {
    let dropped = DropReason::ALL.iter().any(|r| r.as_str() == c.reason && r.is_drop());
    MetricRow {
        endpoint: Some(id.get()),
        direction: c.direction,
        reason: c.reason,
        dropped,
        packets: c.packets,
        bytes: c.bytes,
    }
}

fn past_owner(p: &PastLife) -> PastOwner {
    PastOwner {
        endpoint: p.who.id.get(),
        epoch: p.who.epoch.0,
        attachment: p.who.attachment.to_string(),
        addresses: p.who.addresses.clone(),
        created_unix_ms: p.who.created_unix_ms,
        ended_unix_ms: p.ended.at_unix_ms,
        end: end_in_words(p.ended.how).to_owned(),
    }
}

fn end_in_words(end: End) -> &'static str {
    match end {
        End::Deleted => "deleted",
        End::CreateFailed => "its create failed",
        End::Unnoted => "gone, and nobody noted how",
    }
}

fn several(text: &str, found: &Found) -> Explanation {
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut add = |subject: String, what: String| {
        if !candidates.iter().any(|c| c.subject == subject) {
            candidates.push(Candidate { subject, what });
        }
    };
    for handle in &found.living {
        handle.shared.read(|v| {
            add(v.record.id.to_string(), format!("endpoint {}, {}, {}", v.record.id, v.record.attachment, v.fsm.state));
        });
    }
    for orphan in &found.orphans {
        add(orphan.link.host_ifname.to_string(), format!("link without a record, of endpoint {}", orphan.link.id));
    }
    for (q, attachment) in &found.out_of_service {
        let whose = attachment.as_ref().map_or_else(String::new, |a| format!(", {a}"));
        add(q.id.to_string(), format!("record out of service, of endpoint {}{whose}", q.id));
    }
    if found.living.is_empty() {
        for p in &found.past {
            let a = &p.who.attachment;
            let what = format!("{a}, was endpoint {}, {}", p.who.id, end_in_words(p.ended.how));
            add(format!("{}/{}", a.container_id, a.ifname), what);
        }
    }
    let count = candidates.len();
    candidates.truncate(MAX_LISTED);
    let summary = format!("{count} things are meant by {text:?}; ask for one of them");
    Explanation { candidates, ..blank(text.to_owned(), SubjectKind::Several, Health::Pending, summary) }
}

fn nothing(
    endpoints: &Endpoints,
    keep: Duration,
    text: &str,
    subject: &Subject,
    records: &Result<Vec<Deletion>, Unknown>,
) -> Explanation {
    let keep = conclude::span(u64::try_from(keep.as_millis()).unwrap_or(u64::MAX));
    let mut searched = vec![
        format!("{} endpoints", endpoints.registry.len()),
        format!("{} lives that ended in the last {keep}", endpoints.timelines.ended_count()),
        "endpoints whose records were lost, and records out of service".to_owned(),
    ];
    match records {
        Ok(all) => {
            if let Some(d) = subject::deletion(all, subject) {
                let waited = conclude::span(clock::unix_ms().saturating_sub(d.written_unix_ms));
                let summary = format!(
                    "nothing is left of it but a deletion record, which has waited for {waited}: a DEL found no agent, and the \
                     agent has not finished what it asks for; it tries again by itself"
                );
                let name = format!("{}/{}:{}", d.network, d.container_id, d.ifname);
                return Explanation { searched, ..blank(name, SubjectKind::DeletionRecord, Health::Degraded, summary) };
            }
            searched.push(format!("{} deletion records", all.len()));
        }
        Err(why) => searched.push(format!("not the deletion queue: {why}")),
    }
    if let Subject::Number(id) = subject
        && endpoints.prepared.ids().contains(id)
    {
        let summary =
            "no endpoint has this number yet: programs are kept ready under it, and the next create takes them";
        let name = format!("endpoint {id}");
        return Explanation { searched, ..blank(name, SubjectKind::Unknown, Health::Pending, summary.to_owned()) };
    }
    let near = subject::near(&endpoints.registry, subject, 5);
    let summary = format!("nothing on this node is or was called {text:?}, as far back as the agent remembers");
    Explanation {
        searched,
        candidates: near.into_iter().map(|(subject, what)| Candidate { subject, what }).collect(),
        ..blank(text.to_owned(), SubjectKind::Unknown, Health::Pending, summary)
    }
}

#[cfg(test)]
mod tests;
