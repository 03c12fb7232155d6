//! Explains ended lives, records and kernel objects without an endpoint.

use std::sync::Arc;

use tokio::time::timeout;
use wharf_api::{Explanation, Finding, Health, KernelLook, MendedBy, SubjectKind};
use wharf_core::{
    endpoint::parse_host_ifname,
    ids::{Attachment, EndpointId, Epoch},
    kernel::KernelDump,
    timeline::{End, Outcome, PastLife},
};
use wharf_kit::clock;

use super::{DEADLINE, blank, conclude, end_in_words, fact, look, named, subject::Found, tell};
use crate::{
    endpoint::out_of_service,
    node::{Node, looks::Purpose},
};

pub(super) async fn past(node: &Arc<Node>, past: &PastLife) -> Explanation {
    let who = &past.who;
    let ago = conclude::span(clock::unix_ms().saturating_sub(past.ended.at_unix_ms));
    let unwritten = node.life.endpoints.timelines.unwritten(who.id, who.epoch);
    let life = match unwritten.or_else(|| node.life.store.untold(who.id, who.epoch)) {
        Some(life) => Ok(Some(life)),
        None => match timeout(DEADLINE, node.life.store.life(who.id, who.epoch)).await {
            Ok(life) => life.map_err(|e| e.to_string()),
            Err(_) => Err(format!("the store did not answer within {DEADLINE:?}")),
        },
    };
    let kernel = left_in_kernel(node, who.id, who.epoch, &who.attachment).await;
    let why = life.as_ref().ok().and_then(Option::as_ref).and_then(|life| {
        let failed = life.entries.list().iter().rev().find(|e| e.outcome == Outcome::Failed);
        failed.filter(|_| past.ended.how == End::CreateFailed).map(|e| format!(": {}", e.text))
    });
    let (health, left) = match (&kernel.could_not_look, kernel.findings.len()) {
        (Some(_), _) => (Health::Pending, "; whether the kernel still holds something of it is not known"),
        (None, 0) => (Health::Ok, "; nothing of it is left"),
        (None, _) => {
            (Health::Failing, "; but the kernel still holds something of it: `wharf audit --repair` removes it")
        }
    };
    let lived = conclude::span(past.ended.at_unix_ms.saturating_sub(who.created_unix_ms));
    let how = match past.ended.how {
        End::Deleted => format!("deleted {ago} ago, after a life of {lived}"),
        how => format!("{} {ago} ago{}", end_in_words(how), why.unwrap_or_default()),
    };
    let mut answer = blank(
        format!("endpoint {} of epoch {}", who.id, who.epoch),
        SubjectKind::PastEndpoint,
        health,
        format!("{how}{left}"),
    );
    let addresses: Vec<String> = who.addresses.iter().map(ToString::to_string).collect();
    answer.facts = vec![fact("attachment", who.attachment.to_string())];
    if let Some(pod) = &who.pod_name {
        answer.facts.push(fact("pod", format!("{}/{pod}", who.pod_namespace.as_deref().unwrap_or("-"))));
    }
    answer.facts.push(fact("addresses", if addresses.is_empty() { "none".into() } else { addresses.join(", ") }));
    answer.facts.extend(who.identity.map(|i| fact("identity", named(i))));
    answer.facts.push(fact("epoch", who.epoch.to_string()));
    answer.facts.extend(who.host_ifname.as_ref().map(|name| fact("link", format!("{name}, gone"))));
    match life {
        Ok(Some(life)) => tell(&mut answer, &life.entries),
        Ok(None) => {
            answer.facts.push(fact("timeline", "not in the store: there was no room for it, or it cannot be read"))
        }
        Err(why) => answer.facts.push(fact("timeline", format!("could not be read: {why}"))),
    }
    answer.kernel = Some(kernel);
    answer
}

pub(super) async fn left_in_kernel(
    node: &Arc<Node>,
    id: EndpointId,
    epoch: Epoch,
    attachment: &Attachment,
) -> KernelLook {
    let kernel = Arc::clone(&node.life.kernel);
    // Before and after: a job or prepared program set may reuse the id meanwhile.
    let is_others = || match node.life.endpoints.registry.get(id) {
        Some(there) => there.epoch != epoch,
        None => node.life.endpoints.jobs.is_in_flight(id) || node.life.endpoints.prepared.ids().contains(&id),
    };
    let before = is_others();
    match look(node, Purpose::Explanation, async move { Ok((kernel.dump().await?, kernel.call_slots().await?)) }).await
    {
        Ok((dump, slots)) => {
            let others = before || is_others();
            KernelLook { could_not_look: None, findings: left_in(&dump, &slots, id, epoch, others, attachment) }
        }
        Err(why) => KernelLook { could_not_look: Some(why.to_string()), findings: Vec::new() },
    }
}

/// Only links and rows carry the epoch; pins and slots may be another endpoint's.
fn left_in(
    dump: &KernelDump,
    slots: &[u32],
    id: EndpointId,
    epoch: Epoch,
    others: bool,
    of: &Attachment,
) -> Vec<Finding> {
    let finding = |object: &str, subject: String| Finding {
        object: object.to_owned(),
        subject,
        problem: "is there, and should be gone".to_owned(),
        owner: Some(of.to_string()),
        repairable: true,
        mended_by: MendedBy::Agent,
        ..Finding::default()
    };
    let is_it = |name: &str| parse_host_ifname(name) == Some((id, u32::try_from(epoch.0 & 0xffff_ffff).unwrap_or(0)));
    let mut left = Vec::new();
    left.extend(dump.links.iter().filter(|l| is_it(&l.name)).map(|l| finding("link", l.name.clone())));
    let rows = dump.endpoint_rows.iter().filter(|r| r.endpoint_id == u32::from(id.get()) && r.epoch == epoch);
    left.extend(rows.map(|r| finding("endpoint-row", r.address.to_string())));
    if !others {
        let slots = slots.iter().filter(|slot| **slot == u32::from(id.get()));
        left.extend(slots.map(|slot| finding("call-slot", slot.to_string())));
        let pins = dump.pins.iter().filter(|(directory, _)| *directory == id.to_string());
        left.extend(pins.map(|(directory, _)| finding("pin", directory.clone())));
    }
    left
}

pub(super) async fn out_of_service(node: &Arc<Node>, found: &Found) -> Explanation {
    if let Some(orphan) = found.orphans.first() {
        let summary = "its record was lost with a damaged store: its container has its network as before, and its DEL takes \
                       that away";
        let remedy = "recreate the container; `wharf audit --repair` disconnects every such container at once";
        let name = format!("link {} of endpoint {}", orphan.link.host_ifname, orphan.link.id);
        let mut answer = blank(name, SubjectKind::Orphan, Health::Degraded, summary.to_owned());
        let addresses: Vec<String> = orphan.rows.iter().map(|(ip, _)| ip.to_string()).collect();
        let whose = orphan.attachment.as_ref();
        answer.facts = vec![
            fact("what to do", remedy),
            fact("attachment", whose.map_or_else(|| "its mark does not tell".to_owned(), ToString::to_string)),
            fact("addresses", if addresses.is_empty() { "none".to_owned() } else { addresses.join(", ") }),
            fact("epoch", orphan.link.epoch.to_string()),
        ];
        return answer;
    }
    let Some((q, attachment)) = found.out_of_service.first() else {
        return blank("nothing".into(), SubjectKind::Unknown, Health::Pending, "it went while it was looked at".into());
    };
    let since = conclude::since(clock::unix_ms(), q.since_unix_ms);
    let summary = format!(
        "its record is out of service {since}: {}; id and addresses stay reserved until its container is deleted, or `wharf \
         audit --repair`",
        q.why
    );
    let mut answer =
        blank(format!("endpoint {}, out of service", q.id), SubjectKind::Quarantined, Health::Degraded, summary);
    let addresses: Vec<String> = q.addresses.iter().map(ToString::to_string).collect();
    let whose = attachment.as_ref().map_or_else(|| "cannot be told".to_owned(), ToString::to_string);
    answer.facts = vec![
        fact("attachment", whose),
        fact("addresses", if addresses.is_empty() { "none".to_owned() } else { addresses.join(", ") }),
    ];
    let Some(record) = out_of_service::record_of(q) else { return answer };
    answer.facts.push(fact("epoch", record.epoch.to_string()));
    match timeout(DEADLINE, node.life.store.life(record.id, record.epoch)).await {
        Ok(Ok(Some(life))) => tell(&mut answer, &life.entries),
        Ok(Ok(None)) => {}
        Ok(Err(why)) => answer.facts.push(fact("timeline", format!("could not be read: {why}"))),
        Err(_) => answer.facts.push(fact("timeline", format!("the store did not answer within {DEADLINE:?}"))),
    }
    answer
}
