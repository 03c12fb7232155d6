//! `/v1/config`.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
};

use axum::{Extension, Json, extract::State};
use tokio::sync::oneshot;
use wharf_api::{AgentConfigPatch, AgentConfigView, ApiError, ErrorCode, LogFormat as ApiFormat, SettingOrigin};
use wharf_core::state::{Level, State as EndpointState};
use wharf_kit::{
    sync::lock,
    telemetry::{LogFilter, LogFormat},
};

use crate::{
    config::effective,
    node::{Node, endpoint::Command},
    rest::{
        endpoint::accepts_work,
        error::{Answer, Body, Failure},
        policy::to_its_end,
    },
};

const LOG_LEVEL: &str = "log-level";
const LOG_FORMAT: &str = "log-format";
const POLICY_ENFORCEMENT: &str = "policy-enforcement";
const TRACE: &str = "trace";
const TRACE_SAMPLING: &str = "trace-sampling";

/// Higher values hardly trace a packet.
const MAX_SAMPLING: u32 = 1_000_000;

/// Settings in force, their sources, and whether they can be changed at run time.
#[utoipa::path(get, path = "/v1/config", tag = "agent", responses((status = 200, body = AgentConfigView)))]
pub async fn get(State(node): State<Arc<Node>>, Extension(log): Extension<LogFilter>) -> Json<AgentConfigView> {
    Json(view(&node, &log).await)
}

/// Changes settings, all or none.
#[utoipa::path(patch, path = "/v1/config", tag = "agent", request_body = AgentConfigPatch,
    responses((status = 200, body = AgentConfigView), (status = 400, body = ApiError), (status = 422, body = ApiError),
        (status = 500, body = ApiError), (status = 503, body = ApiError)))]
pub async fn patch(
    State(node): State<Arc<Node>>,
    Extension(log): Extension<LogFilter>,
    Body(body): Body<AgentConfigPatch>,
) -> Answer<Json<AgentConfigView>> {
    accepts_work(&node, "change configuration")?;
    check(&body)?;
    if let Some(enforcement) = body.policy_enforcement {
        let old = node.life.policy.enforcement().await;
        to_its_end(&node, move |policy| async move { policy.set_enforcement(enforcement).await }).await?;
        changed(&node, POLICY_ENFORCEMENT, old.as_str(), enforcement.as_str());
    }
    if let Some(filter) = &body.log_level {
        let old = log.get();
        log.set(filter).map_err(|e| invalid(&e.to_string()))?;
        changed(&node, LOG_LEVEL, &old, filter);
    }
    if let Some(format) = body.log_format {
        let old = api_format(log.format());
        log.set_format(match format {
            ApiFormat::Text => LogFormat::Text,
            ApiFormat::Json => LogFormat::Json,
        });
        changed(&node, LOG_FORMAT, format_name(old), format_name(format));
    }
    if let Some(one_in) = body.trace_sampling {
        let old = node.life.telemetry.monitor.sampling();
        node.life.telemetry.monitor.set_sampling(one_in);
        changed(&node, TRACE_SAMPLING, &old.to_string(), &node.life.telemetry.monitor.sampling().to_string());
    }
    if let Some(trace) = body.trace {
        let old = node.life.telemetry.trace_all.swap(trace, Ordering::Relaxed);
        changed(&node, TRACE, on_off(old), on_off(trace));
        realize_trace(&node).await?;
    }
    Ok(Json(view(&node, &log).await))
}

fn check(body: &AgentConfigPatch) -> Answer<()> {
    if let Some(filter) = &body.log_level {
        LogFilter::check(filter).map_err(|e| invalid(&e.to_string()))?;
    }
    if let Some(one_in) = body.trace_sampling.filter(|one_in| *one_in > MAX_SAMPLING) {
        let why = format!("change configuration: trace-sampling: {one_in} is above {MAX_SAMPLING}");
        return Err(Failure::new(ErrorCode::InvalidRequest, why));
    }
    Ok(())
}

fn invalid(why: &str) -> Failure {
    Failure::new(ErrorCode::InvalidRequest, format!("change configuration: {LOG_LEVEL} {why}"))
        .hint("for example info, or wharf_agent=debug,info")
}

fn changed(node: &Node, setting: &'static str, old: &str, new: &str) {
    lock(&node.changed_settings).insert(setting);
    tracing::info!(setting, old, new, "a setting was changed");
    node.life.telemetry.monitor.agent(None, "config-changed", format!("{setting}: {old} -> {new}"));
}

async fn realize_trace(node: &Node) -> Answer<()> {
    let mut failed = Vec::new();
    for handle in node.life.endpoints.registry.list() {
        let (done, answer) = oneshot::channel();
        if handle.mailbox.send(Command::Regenerate(Level::Policy, done)).await.is_ok()
            && let Ok(Err(why)) = answer.await
            && handle.shared.read(|v| !v.fsm.state.is_terminal() && v.fsm.state != EndpointState::Disconnecting)
        {
            failed.push(format!("endpoint {}: {why}", handle.id));
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    Err(Failure::new(ErrorCode::Kernel, format!("change trace: {}", failed.join("; "))))
}

async fn view(node: &Node, log: &LogFilter) -> AgentConfigView {
    let mut settings = effective(&node.life.config);
    settings.extend([
        (LOG_LEVEL.to_owned(), log.get()),
        (LOG_FORMAT.to_owned(), format_name(api_format(log.format())).to_owned()),
        (TRACE.to_owned(), node.life.telemetry.trace_all.load(Ordering::Relaxed).to_string()),
        (TRACE_SAMPLING.to_owned(), node.life.telemetry.monitor.sampling().to_string()),
        (POLICY_ENFORCEMENT.to_owned(), node.life.policy.enforcement().await.as_str().to_owned()),
    ]);
    let changed = lock(&node.changed_settings).clone();
    let origin_of = |name: &String| match node.life.config.origins.get(name) {
        _ if changed.contains(name.as_str()) => SettingOrigin::RunTime,
        Some(origin) => *origin,
        None => SettingOrigin::Default,
    };
    let origin: BTreeMap<String, SettingOrigin> = settings.keys().map(|n| (n.clone(), origin_of(n))).collect();
    let mutable = [LOG_FORMAT, LOG_LEVEL, POLICY_ENFORCEMENT, TRACE, TRACE_SAMPLING].map(str::to_owned).to_vec();
    AgentConfigView { effective: settings, mutable, origin }
}

const fn api_format(format: LogFormat) -> ApiFormat {
    match format {
        LogFormat::Text => ApiFormat::Text,
        LogFormat::Json => ApiFormat::Json,
    }
}

const fn format_name(format: ApiFormat) -> &'static str {
    match format {
        ApiFormat::Text => "text",
        ApiFormat::Json => "json",
    }
}

const fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(patch: AgentConfigPatch) -> ApiError {
        check(&patch).expect_err("refused").0
    }

    #[test]
    fn a_level_that_is_none_is_refused_with_what_is_allowed() {
        let error = refused(AgentConfigPatch { log_level: Some("zzz".into()), ..AgentConfigPatch::default() });
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert!(error.message.contains("error, warn, info"), "{}", error.message);
    }
}
