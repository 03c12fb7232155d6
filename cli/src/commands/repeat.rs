//! Answers that are shown once, or with `--watch` again after each change.

use std::time::Duration;

use serde::Serialize;

use super::Context;
use crate::{error::CliError, output::remark, render::Style};

/// How often the agent is asked with `--watch`.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

/// An answer, and a remark about it.
pub(super) struct Answer<T> {
    /// The answer.
    pub(super) value: T,
    /// A line for people; not printed with `--watch` and in formats for scripts.
    pub(super) remark: Option<String>,
}

impl<T> Answer<T> {
    /// An answer without a remark.
    pub(super) fn plain(value: T) -> Self {
        Self { value, remark: None }
    }
}

/// Asks and shows the answer; with `watch` again and again, until writing or asking fails.
///
/// # Errors
/// Asking failed, or the answer cannot be written.
pub(super) async fn show<T: Serialize>(
    cx: &Context,
    watch: bool,
    ask: impl AsyncFn() -> Result<Answer<T>, CliError>,
    table: impl Fn(&T, &Style) -> String,
) -> Result<(), CliError> {
    if !watch {
        let Answer { value, remark: told } = ask().await?;
        cx.out.emit(&value, |style| table(&value, style))?;
        if let Some(told) = told.filter(|_| cx.out.is_table()) {
            remark(&format!("wharf: {told}"));
        }
        return Ok(());
    }
    let mut last = None;
    loop {
        let value = ask().await?.value;
        let text = cx.out.line(&value, |style| table(&value, style))?;
        if last.as_ref() != Some(&text) {
            cx.out.replace(&text, last.is_none())?;
            last = Some(text);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
