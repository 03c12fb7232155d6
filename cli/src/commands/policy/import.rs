//! `wharf policy import`.

use std::path::PathBuf;

use wharf_api::{ErrorCode, PolicyChange, PolicyImport, client::ClientError};

use super::{super::Context, documents::read_all, unselective};
use crate::{
    error::{CliError, Exit},
    output::remark,
    render::{policy::changes, text::safe},
};

const OPERATION: &str = "import policies";

/// Checks all files, then sends one at a time. After a refusal, earlier files stay in force; the message lists them.
pub(super) async fn run(cx: &Context, paths: &[PathBuf]) -> Result<Exit, CliError> {
    let mut imports = Vec::new();
    read_all(OPERATION, paths, |import| imports.push(import))
        .map_err(|error| CliError { message: format!("{}; nothing was sent", error.message), ..error })?;
    let mut done = Vec::new();
    let mut failed = None;
    for import in &imports {
        match cx.client.import_policy(import).await {
            Ok(change) => done.push(change),
            Err(error) => {
                failed = Some(refused(import, error));
                break;
            }
        }
    }
    cx.out.emit(&done, |_| changes(&done))?;
    unselective::warn(cx, &done).await;
    match failed {
        Some(error) => Err(error),
        None => Ok(Exit::well(done.iter().all(PolicyChange::is_in_force))),
    }
}

/// One line per reason, as in the local check.
fn refused(import: &PolicyImport, error: ClientError) -> CliError {
    let PolicyImport { file, .. } = import;
    match error {
        ClientError::Api { error, .. } if error.code == ErrorCode::InvalidRequest => {
            error.message.lines().for_each(|line| remark(&safe(line)));
            let refused = CliError::refused(format!("{OPERATION}: the agent refused {file}"));
            CliError { hint: error.hint, ..refused }
        }
        error => {
            let error = CliError::from(error);
            CliError { message: format!("{OPERATION}: {file}: {}", error.message), ..error }
        }
    }
}
