//! Streams that break the rules: a message that is too long, and a producer that reads no answer.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tonic::{Code, Status};
use wharf_feed::{
    MAX_MESSAGE,
    v1::{self, producer_message::Body},
};
use wharf_tests::{
    Node,
    feed::{Producer, begin, complete, namespace, opening, pod, policy},
    wait,
};

use super::{DENY, KINDS, OWN, TO_B, fed, kube, last, node_b, own_node, routes, rows, snapshot, view};

fn changes(changes: Vec<v1::Change>) -> Body {
    Body::Changes(v1::Changes { changes })
}

#[test]
fn a_message_beyond_the_limit_ends_its_stream_and_changes_nothing() -> Result<()> {
    fed(|node, socket| {
        let mut producer = kube(socket)?;
        snapshot(&mut producer, vec![own_node(), node_b(), namespace("shop", &[])])?;
        let before = rows(node)?;
        // Five rows of 1 MiB, each of which the agent takes.
        let large = |n: u32| policy(&format!("large-{n}"), &format!("{DENY}# {}\n", "x".repeat(1 << 20)));
        producer.say(changes((0..5).map(large).collect()))?;
        let error = last(&mut producer).err().context("the stream continues")?;
        let status = error.downcast_ref::<Status>().with_context(|| format!("{error:#}"))?;
        ensure!(status.code() == Code::OutOfRange, "{status:?}");
        ensure!(status.message().contains(&MAX_MESSAGE.to_string()), "the reason lacks the limit: {status:?}");
        wait::until("a line of the log", || {
            Ok(node.log().lines().any(|line| line.contains(status.message())).then_some(()))
        })?;
        wait::until("the end of the stream", || Ok(view(node)?.connected_since_unix_ms.is_none().then_some(())))?;
        ensure!(rows(node)? == before && routes(node)? == [TO_B], "{:?}, {:?}", rows(node)?, routes(node)?);
        let mut next = kube(socket)?;
        next.send(Vec::new())?;
        next.settle()
    })
}

/// Bytes of the agent's memory.
fn resident(node: &Node) -> Result<u64> {
    Ok(node.ask(async |client| client.status().await)?.resident_bytes)
}

#[test]
fn a_producer_that_reads_no_answer_is_not_read_and_is_replaced() -> Result<()> {
    const MIB: usize = 1 << 20;
    /// Beyond what the buffers of both sides take.
    const OFFERED: usize = 64;
    const GROWTH: u64 = 24 << 20;
    /// For a message that the agent does not take.
    const PATIENCE: Duration = Duration::from_secs(2);
    fed(|node, socket| {
        let mut silent = Producer::connect_with(socket, Some(1_024))?;
        silent.say(Body::Opening(opening("kube", "one", OWN, &KINDS)))?;
        let before = resident(node)?;
        // The answers name all of these rows.
        let bad = |n: usize| pod(&format!("{n}-{}", "x".repeat(100)), "b", &["no address"], &[]);
        let (mut taken, mut is_blocked) = (0, false);
        while taken < OFFERED && !is_blocked {
            let padding = policy("padding", &format!("{DENY}# {}\n", "x".repeat(MIB)));
            let rows = (0..256).map(bad).chain([padding]);
            let begins = ["pod", "policy"].into_iter().filter(|_| taken == 0).map(begin);
            is_blocked = !silent.offer(changes(begins.chain(rows).collect()), PATIENCE)?;
            taken += usize::from(!is_blocked);
        }
        ensure!(is_blocked, "{taken} messages of 1 MiB are taken, and no answer is read");
        let processed = view(node)?.processed.context("no message is processed")?;
        ensure!(processed <= 8, "message {processed} is processed, and no answer is read");
        let grown = resident(node)?.saturating_sub(before);
        ensure!(grown <= GROWTH, "the agent has grown by {grown} bytes");

        // Another stream of the producer replaces it, while it is there.
        let kinds = ["node", "namespace"];
        let mut next = Producer::opened(socket, opening("kube", "one", OWN, &kinds))?;
        let rows = [own_node(), node_b(), namespace("shop", &[])];
        next.send(kinds.into_iter().map(begin).chain(rows).chain(kinds.into_iter().map(complete)).collect())?;
        next.settle()?;
        ensure!(routes(node)? == [TO_B], "{:?}", routes(node)?);
        ensure!(view(node)?.processed == Some(2), "{:?}", view(node)?);
        // Nor does it delay a stop.
        drop(next);
        let stopping = std::time::Instant::now();
        node.stop_agent()?;
        ensure!(stopping.elapsed() < Duration::from_secs(10), "the stop took {:?}", stopping.elapsed());
        drop(silent);
        node.start_agent()
    })
}
