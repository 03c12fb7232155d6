//! `/v1/monitor`: events as newline-delimited JSON.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use futures::stream;
use tokio::sync::broadcast::error::RecvError;
use wharf_api::{ApiError, ErrorCode, MonitorEvent};

use crate::{
    node::Node,
    rest::error::{Answer, Failure},
};

/// A reader costs a copy of every event.
const MAX_READERS: usize = 16;

/// The proxy enables request events meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);

/// Streams events from now on. A slow reader receives the number of lost events.
#[utoipa::path(get, path = "/v1/monitor", tag = "agent",
    responses((status = 200, body = MonitorEvent, content_type = "application/x-ndjson"), (status = 429, body = ApiError)))]
pub async fn stream_events(State(node): State<Arc<Node>>) -> Answer<Response> {
    if node.life.telemetry.monitor.readers() >= MAX_READERS {
        return Err(Failure::new(ErrorCode::Overloaded, format!("monitor: {MAX_READERS} readers already")));
    }
    let watching = node.life.policy.proxy.redirects.watch();
    if let Some(watching) = &watching {
        drop(tokio::time::timeout(PATIENCE, watching.begun()).await);
    }
    let receiver = node.life.telemetry.monitor.subscribe();
    let stop = node.life.tasks.stop.clone();
    let lines = stream::unfold((receiver, stop, watching), |(mut receiver, stop, watching)| async move {
        let event = tokio::select! {
            () = stop.cancelled() => return None,
            event = receiver.recv() => event,
        };
        let line = match event {
            Ok(event) => encode(&event),
            Err(RecvError::Lagged(count)) => encode(&MonitorEvent::Lost { count }),
            Err(RecvError::Closed) => return None,
        };
        Some((line, (receiver, stop, watching)))
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response())
}

fn encode(event: &MonitorEvent) -> Result<Bytes, serde_json::Error> {
    let mut line = serde_json::to_vec(event)?;
    line.push(b'\n');
    Ok(line.into())
}
