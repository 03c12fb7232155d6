//! `wharf config ...`.

use std::collections::BTreeMap;

use wharf_api::AgentConfigPatch;

use super::Context;
use crate::{
    args::{ConfigCommand, Setting, SettingName},
    error::{CliError, Exit},
    render::{config, text},
};

pub(super) async fn run(cx: &Context, command: ConfigCommand) -> Result<Exit, CliError> {
    match command {
        ConfigCommand::Get { key: None } => {
            let view = cx.client.config().await?;
            cx.out.emit(&view, |style| config::list(&view, style))?;
        }
        ConfigCommand::Get { key: Some(SettingName(key)) } => {
            let view = cx.client.config().await?;
            let Some(value) = view.effective.get(&key) else {
                return Err(CliError::refused(format!("the agent has no setting {key:?}"))
                    .hint("`wharf config get` shows every setting"));
            };
            let one = BTreeMap::from([(&key, value)]);
            cx.out.emit(&one, |_| text::safe(value) + "\n")?;
        }
        ConfigCommand::Set { settings } => {
            let names: Vec<&str> = settings.iter().map(Setting::name).collect();
            let patch = patch(settings)?;
            let before = cx.client.config().await?;
            let after = cx.client.patch_config(&patch).await?;
            cx.out.emit(&after, |_| config::changes(&names, &before, &after))?;
        }
    }
    Ok(Exit::Ok)
}

/// Rejects repeated settings: merging would hide the mistake.
fn patch(settings: Vec<Setting>) -> Result<AgentConfigPatch, CliError> {
    let mut patch = AgentConfigPatch::default();
    for setting in settings {
        let name = setting.name();
        let twice = match setting {
            Setting::LogLevel(level) => patch.log_level.replace(level).is_some(),
            Setting::LogFormat(format) => patch.log_format.replace(format).is_some(),
            Setting::Trace(on) => patch.trace.replace(on).is_some(),
            Setting::TraceSampling(one_in) => patch.trace_sampling.replace(one_in).is_some(),
            Setting::PolicyEnforcement(mode) => patch.policy_enforcement.replace(mode).is_some(),
        };
        if twice {
            return Err(CliError::usage(format!("{name} is set twice")));
        }
    }
    Ok(patch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_become_one_change() {
        let both = patch(vec![Setting::Trace(true), Setting::LogLevel("debug".to_owned())]);
        let wanted =
            AgentConfigPatch { log_level: Some("debug".to_owned()), trace: Some(true), ..AgentConfigPatch::default() };
        assert_eq!(both.ok(), Some(wanted));
        let twice = patch(vec![Setting::Trace(true), Setting::Trace(false)]).err();
        let twice = twice.as_ref().map(|e| (e.exit, e.message.as_str()));
        assert_eq!(twice, Some((Exit::Usage, "trace is set twice")));
    }
}
