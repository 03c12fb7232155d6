//! Counts the CNI plugin's requests by command.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    http::StatusCode,
    middleware::Next,
    response::Response,
};
use wharf_api::{COMMAND_HEADER, ErrorCode};
use wharf_core::ids::{ContainerId, IfName};
use wharf_handover::{
    command::{Command, Verb},
    report::Outcome,
};

use crate::{commands::Commands, node::Node, rest::operation::Told};

/// The command's log line reports this answer.
#[derive(Debug, Clone, Copy)]
pub struct Counted;

/// A durable record made the command succeed.
#[derive(Debug, Clone, Copy)]
pub struct Deferred;

#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The plugin retries, or reports the end.
    NotYet,
    /// A DEL without an endpoint.
    Nothing,
    Ended(Outcome, Option<ErrorCode>, String),
}

/// `node` is `None` in delegated mode.
pub async fn measure(
    State((commands, node)): State<(Arc<Commands>, Option<Arc<Node>>)>,
    request: Request,
    next: Next,
) -> Response {
    let Some(header) = request.headers().get(COMMAND_HEADER) else { return next.run(request).await };
    let (command, age) = match Command::of_header(header.as_bytes()) {
        Ok(named) => named,
        Err(why) => {
            tracing::warn!("read header {COMMAND_HEADER}: {why}; the request is not counted as a CNI command");
            return next.run(request).await;
        }
    };
    let is_chained = command.chained || node.is_some_and(|node| is_chained(&node, &command));
    let command = Command { chained: is_chained, ..command };
    let verb = command.verb;
    let running = commands.begin(command, age);
    let mut response = next.run(request).await;
    match end(verb, response.status(), response.extensions().get::<Told>()) {
        End::NotYet => running.pass(),
        End::Nothing => {
            running.end_with_nothing();
            response.extensions_mut().insert(Counted);
        }
        End::Ended(Outcome::Success, ..) if response.extensions().get::<Deferred>().is_some() => {
            running.end(Outcome::Deferred, None, String::new());
        }
        End::Ended(outcome, code, message) => {
            let code = code.and_then(|code| Some(serde_json::to_value(code).ok()?.as_str()?.to_owned()));
            running.end(outcome, code, message);
            response.extensions_mut().insert(Counted);
        }
    }
    response
}

/// Whether the link is another plugin's, which a DEL does not say.
fn is_chained(node: &Node, command: &Command) -> bool {
    let (Ok(container), Ok(ifname)) = (ContainerId::parse(&command.container_id), IfName::parse(&command.ifname))
    else {
        return false;
    };
    let there = node.life.endpoints.registry.by_interface(&container, &ifname);
    there.is_some_and(|there| there.shared.read(|view| !view.record.link_owner.is_wharf()))
}

/// `cni/src/retry.rs` has the same rule.
fn end(verb: Verb, status: StatusCode, told: Option<&Told>) -> End {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => End::NotYet,
        StatusCode::PARTIAL_CONTENT => {
            let message = "steps of it failed and are tried again; the lines of this operation name them";
            End::Ended(Outcome::Failure, None, message.to_owned())
        }
        StatusCode::NOT_FOUND if verb == Verb::Del => End::Nothing,
        status if status.is_success() => End::Ended(Outcome::Success, None, String::new()),
        status => {
            let (code, message) = told.map_or((None, status.to_string()), |t| (Some(t.code), t.message.clone()));
            End::Ended(Outcome::Failure, code, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_where_the_plugin_does_not_ask_again() {
        let of = |verb, status| end(verb, StatusCode::from_u16(status).expect("a status"), None);
        let success = || End::Ended(Outcome::Success, None, String::new());
        assert_eq!((of(Verb::Add, 429), of(Verb::Del, 503)), (End::NotYet, End::NotYet));
        assert_eq!((of(Verb::Add, 201), of(Verb::Del, 200), of(Verb::Gc, 200)), (success(), success(), success()));
        assert_eq!(of(Verb::Del, 404), End::Nothing);
        for (verb, status) in [(Verb::Del, 206), (Verb::Gc, 206), (Verb::Gc, 404), (Verb::Add, 409), (Verb::Add, 500)] {
            assert!(matches!(of(verb, status), End::Ended(Outcome::Failure, ..)), "{verb:?} {status}");
        }
    }
}
