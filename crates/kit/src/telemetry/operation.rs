//! Operations: actions with an id in logs and error answers, unique within the process; its letter is the kind
//! (`c-000012`: create).

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use tracing::{Instrument, Span, field};
use wharf_core::ids::{Attachment, EndpointId, Epoch};

/// Target, always enabled.
pub const TARGET: &str = "wharf_agent::operation";

/// Span fields.
pub const FIELDS: [&str; 4] = ["op", "endpoint", "epoch", "attachment"];

/// Operation kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Create,
    Delete,
    /// Regeneration.
    Regenerate,
    /// Restore at a start.
    Restore,
    /// Processing of deletion records.
    Drain,
    /// Another API request.
    Request,
}

impl Kind {
    const fn letter(self) -> char {
        match self {
            Self::Create => 'c',
            Self::Delete => 'd',
            Self::Regenerate => 'g',
            Self::Restore => 'r',
            Self::Drain => 'q',
            Self::Request => 'a',
        }
    }
}

/// An operation's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpId {
    kind: Kind,
    number: u64,
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:06}", self.kind.letter(), self.number)
    }
}

static LAST: AtomicU64 = AtomicU64::new(0);

tokio::task_local! {
    static CURRENT: OpId;
}

impl OpId {
    /// A new id.
    #[must_use]
    pub fn next(kind: Kind) -> Self {
        Self { kind, number: LAST.fetch_add(1, Ordering::Relaxed) + 1 }
    }

    /// Current or new.
    #[must_use]
    pub fn current_or_next(kind: Kind) -> Self {
        current().unwrap_or_else(|| Self::next(kind))
    }

    /// Its span; [`about`] sets the subject.
    #[must_use]
    pub fn span(self) -> Span {
        // A log of errors shows no span of a lower level.
        tracing::error_span!(
            target: TARGET,
            "operation",
            op = %self,
            endpoint = field::Empty,
            epoch = field::Empty,
            attachment = field::Empty,
        )
    }
}

/// The id of the task's operation; spawned tasks do not inherit it.
#[must_use]
pub fn current() -> Option<OpId> {
    CURRENT.try_with(|op| *op).ok()
}

/// Sets the subject.
pub fn about(span: &Span, endpoint: Option<(EndpointId, Epoch)>, attachment: &Attachment) {
    if let Some((id, epoch)) = endpoint {
        span.record("endpoint", id.get());
        span.record("epoch", epoch.0);
    }
    span.record("attachment", field::display(attachment));
}

/// Runs work in the span; [`current`] returns `op`.
pub async fn within<F: Future>(op: OpId, span: Span, work: F) -> F::Output {
    CURRENT.scope(op, work).instrument(span).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_short_and_never_the_same() {
        let (a, b) = (OpId::next(Kind::Create), OpId::next(Kind::Create));
        assert_ne!(a, b);
        assert!(a.to_string().starts_with("c-") && a.to_string().len() == 8, "{a}");
        assert_eq!(OpId { kind: Kind::Drain, number: 1_234_567 }.to_string(), "q-1234567");
    }

    #[tokio::test]
    async fn work_within_an_operation_knows_its_id() {
        assert_eq!(current(), None);
        let op = OpId::next(Kind::Delete);
        let inside = within(op, op.span(), async { OpId::current_or_next(Kind::Create) }).await;
        assert_eq!(inside, op);
        assert_eq!(current(), None);
    }
}
