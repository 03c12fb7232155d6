//! Shows answers once, or with `--watch` after each change.

use std::time::Duration;

use serde::Serialize;

use super::Context;
use crate::{error::CliError, output::remark, render::Style};

pub(super) const INTERVAL: Duration = Duration::from_secs(1);

pub(super) struct Answer<T> {
    pub(super) value: T,
    /// Omitted with `--watch` and in script formats.
    pub(super) remark: Option<String>,
}

impl<T> Answer<T> {
    pub(super) fn plain(value: T) -> Self {
        Self { value, remark: None }
    }
}

/// With `watch`, repeats until an error.
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
