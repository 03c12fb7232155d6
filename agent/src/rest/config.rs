//! `/v1/config`.

use std::sync::{Arc, atomic::Ordering};

use axum::{Extension, Json, extract::State};
use tokio::sync::oneshot;
use wharf_api::{AgentConfigPatch, AgentConfigView, ApiError, ErrorCode};

use crate::{
    config::effective,
    endpoint::task::Command,
    rest::{
        LinuxNode,
        endpoint::accepts_work,
        error::{Answer, Body, Failure},
    },
    telemetry::LogFilter,
};

/// The settings in force, and which of them can be changed while the agent runs.
#[utoipa::path(get, path = "/v1/config", tag = "agent", responses((status = 200, body = AgentConfigView)))]
pub async fn get(State(node): State<Arc<LinuxNode>>, Extension(log): Extension<LogFilter>) -> Json<AgentConfigView> {
    Json(view(&node, &log))
}

/// Changes settings; what is not named stays. Nothing changes when any of them is wrong.
#[utoipa::path(patch, path = "/v1/config", tag = "agent", request_body = AgentConfigPatch,
    responses((status = 200, body = AgentConfigView), (status = 400, body = ApiError), (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn patch(
    State(node): State<Arc<LinuxNode>>,
    Extension(log): Extension<LogFilter>,
    Body(body): Body<AgentConfigPatch>,
) -> Answer<Json<AgentConfigView>> {
    accepts_work(&node, "change configuration")?;
    if let Some(filter) = &body.log_level {
        log.set(filter).map_err(|e| {
            Failure::new(ErrorCode::InvalidRequest, format!("change configuration: {e}"))
                .hint("for example info, or wharf_agent=debug")
        })?;
    }
    if let Some(trace) = body.trace {
        node.trace_all.store(trace, Ordering::Relaxed);
        let mut failed = Vec::new();
        for handle in node.registry.list() {
            let (done, answer) = oneshot::channel();
            let command = Command::Regenerate(wharf_core::state::Level::Policy, done);
            // An endpoint that is gone or going needs no tracing.
            if handle.mailbox.send(command).await.is_ok()
                && let Ok(Err(why)) = answer.await
                && handle
                    .shared
                    .read(|v| !v.fsm.state.is_terminal() && v.fsm.state != wharf_core::state::State::Disconnecting)
            {
                failed.push(format!("endpoint {}: {why}", handle.id));
            }
        }
        if !failed.is_empty() {
            return Err(Failure::new(ErrorCode::Kernel, format!("change trace: {}", failed.join("; "))));
        }
    }
    Ok(Json(view(&node, &log)))
}

fn view(node: &LinuxNode, log: &LogFilter) -> AgentConfigView {
    let mut settings = effective(&node.config);
    settings.insert("log-level".into(), log.get());
    settings.insert("trace".into(), node.trace_all.load(Ordering::Relaxed).to_string());
    AgentConfigView { effective: settings, mutable: vec!["log-level".into(), "trace".into()] }
}
