//! The value kind at the cursor, from clap's command tree.

use std::any::TypeId;

use clap::{Arg, ArgAction, Command};
use wharf_sandbox::SandboxName;

use crate::{
    args::{MapName, NamespaceName, PolicyName, QualifiedPolicyName, Setting, SettingName},
    target::Target,
};

/// Kinds of completed values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expected {
    Endpoint,
    /// Without a namespace.
    PolicyName,
    /// `[NAMESPACE/]NAME`.
    QualifiedPolicyName,
    Namespace,
    /// Unknown to the agent.
    Sandbox,
    Map,
    SettingName,
    Setting,
}

impl Expected {
    fn of(argument: &Arg) -> Option<Self> {
        let of_type = argument.get_value_parser().type_id();
        [
            (TypeId::of::<Target>(), Self::Endpoint),
            (TypeId::of::<MapName>(), Self::Map),
            (TypeId::of::<SettingName>(), Self::SettingName),
            (TypeId::of::<Setting>(), Self::Setting),
            (TypeId::of::<PolicyName>(), Self::PolicyName),
            (TypeId::of::<QualifiedPolicyName>(), Self::QualifiedPolicyName),
            (TypeId::of::<NamespaceName>(), Self::Namespace),
            (TypeId::of::<SandboxName>(), Self::Sandbox),
        ]
        .into_iter()
        .find_map(|(id, expected)| (of_type == id).then_some(expected))
    }
}

/// `words` follow the program name; the last one may be incomplete.
pub(crate) fn expected(root: &Command, words: &[String]) -> Option<Expected> {
    let (current, before) = words.split_last()?;
    let (mut command, mut position, mut only_values) = (root, 0, false);
    // Option that needs a value.
    let mut open: Option<&Arg> = None;
    for word in before {
        if open.take().is_some() {
            continue;
        }
        match word.as_str() {
            _ if only_values => position += 1,
            "--" => only_values = true,
            option if option.starts_with('-') && option.len() > 1 => {
                open = find_option(root, command, option).filter(|_| !option.contains('='));
            }
            name => match command.find_subcommand(name) {
                Some(sub) => (command, position) = (sub, 0),
                None => position += 1,
            },
        }
    }
    if let Some(option) = open {
        return Expected::of(option);
    }
    if current.starts_with('-') && !only_values {
        return None;
    }
    let positionals: Vec<&Arg> = command.get_positionals().collect();
    // May take several values.
    let last = positionals.last().filter(|a| matches!(a.get_action(), ArgAction::Append));
    // `create` takes a new name.
    Expected::of(positionals.get(position).or(last)?).filter(|_| command.get_name() != "create")
}

/// `None` for a flag.
fn find_option<'a>(root: &'a Command, command: &'a Command, word: &str) -> Option<&'a Arg> {
    let name = word.split('=').next().unwrap_or(word);
    let is_named = |a: &&Arg| match name.strip_prefix("--") {
        Some(long) => a.get_long() == Some(long),
        None => name.strip_prefix('-').is_some_and(|s| a.get_short().is_some_and(|c| s.chars().eq([c]))),
    };
    // Global options are on the root command.
    let option = command.get_arguments().chain(root.get_arguments()).find(is_named)?;
    option.get_action().takes_values().then_some(option)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn what_stands_where() {
        let command = Cli::command();
        for (line, wanted) in [
            ("endpoint get ", Some(Expected::Endpoint)),
            ("endpoint get 7 ", None),
            ("ep get 3f", Some(Expected::Endpoint)),
            ("-o json endpoint health ", Some(Expected::Endpoint)),
            ("endpoint -ojson delete --keep-ip ", Some(Expected::Endpoint)),
            ("endpoint delete --epoch ", None),
            ("endpoint delete --epoch 7 ", Some(Expected::Endpoint)),
            ("--socket /run/x.sock explain ", Some(Expected::Endpoint)),
            ("--socket ", None),
            ("monitor --endpoint ", Some(Expected::Endpoint)),
            ("monitor --endpoint 7 ", None),
            ("monitor --type=drop --endpoint ", Some(Expected::Endpoint)),
            ("bpf metrics list --dropped --endpoint ", Some(Expected::Endpoint)),
            ("bpf ct flush --endpoint ", Some(Expected::Endpoint)),
            ("bpf map get ", Some(Expected::Map)),
            ("bpf policy get ", Some(Expected::Endpoint)),
            ("policy explain --from 7 --to ", Some(Expected::Endpoint)),
            ("policy delete ", None),
            ("policy delete NetworkPolicy ", Some(Expected::PolicyName)),
            ("policy delete -n shop NetworkPolicy d", Some(Expected::PolicyName)),
            ("policy delete NetworkPolicy db -n ", Some(Expected::Namespace)),
            ("policy get ", Some(Expected::QualifiedPolicyName)),
            ("policy describe sh", Some(Expected::QualifiedPolicyName)),
            ("endpoint list --namespace ", Some(Expected::Namespace)),
            ("namespace delete ", Some(Expected::Namespace)),
            ("namespace set ", Some(Expected::Namespace)),
            ("namespace set shop ", None),
            ("sandbox rm ", Some(Expected::Sandbox)),
            ("sandbox rm web ", Some(Expected::Sandbox)),
            ("sb --state-dir /x inspect ", Some(Expected::Sandbox)),
            ("sandbox create ", None),
            ("config get ", Some(Expected::SettingName)),
            ("config set ", Some(Expected::Setting)),
            ("config set trace=on log-", Some(Expected::Setting)),
            ("endpoint get -", None),
            ("endpoint get -- ", Some(Expected::Endpoint)),
            ("endpoint ", None),
            ("", None),
        ] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(expected(&command, &words), wanted, "{line:?}");
        }
    }
}
