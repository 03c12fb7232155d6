//! Completion scripts from the clap definition.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::{
    args::Cli,
    error::{CliError, Exit},
    output::write_text,
};

pub(super) fn completion(shell: Shell) -> Result<Exit, CliError> {
    // The generator panics on write errors, such as a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "wharf", &mut script);
    write_text(&with_candidates(shell, &String::from_utf8_lossy(&script)))?;
    Ok(Exit::Ok)
}

/// Extends clap's script by `wharf candidates`.
fn with_candidates(shell: Shell, script: &str) -> String {
    match shell {
        Shell::Bash => format!("{script}{BASH}"),
        Shell::Fish => format!("{script}{FISH}"),
        Shell::Zsh => match script.rsplit_once(ZSH_END) {
            Some((functions, _)) => format!("{functions}{ZSH}{ZSH_END}"),
            None => script.to_owned(),
        },
        _ => script.to_owned(),
    }
}

/// No shell expansion of answers, and no files for names.
const BASH: &str = r#"
_wharf_candidates() {
    local line answer
    COMPREPLY=()
    if answer=$(wharf candidates -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null); then
        compopt +o bashdefault +o default 2>/dev/null
        while IFS= read -r line; do
            [[ -z $line ]] || COMPREPLY+=("${line%%$'\t'*}")
        done <<< "$answer"
    else
        _wharf "$@"
    fi
}
complete -F _wharf_candidates -o bashdefault -o default wharf
"#;

/// clap's script offers no files (`-f`) for positional arguments.
const FISH: &str = r#"
complete -c wharf -f -a '(wharf candidates -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
complete -c wharf -n '__fish_seen_subcommand_from validate' -F
"#;

const ZSH: &str = r#"functions[_wharf_static]=$functions[_wharf]
_wharf() {
    local answer
    local -a candidates
    if answer="$(wharf candidates -- "${(@)words[2,CURRENT]}" 2>/dev/null)"; then
        candidates=("${(@f)answer}")
        candidates=("${(@)candidates%%$'\t'*}")
        candidates=("${(@)candidates:#}")
        (( $#candidates )) && compadd -- "${(@)candidates}"
    else
        _wharf_static "$@"
    fi
}

"#;

const ZSH_END: &str = r#"if [ "$funcstack[1]" = "_wharf" ]; then
    _wharf "$@"
else
    compdef _wharf wharf
fi
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scripts_ask_for_candidates() {
        for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "wharf", &mut script);
            let made = String::from_utf8(script).expect("UTF-8");
            let whole = with_candidates(shell, &made);
            assert_eq!(whole.matches("wharf candidates -- ").count(), 1, "{shell}");
            // clap omits hidden commands.
            assert!(!made.contains("candidates") && !made.contains("__man"), "{shell}");
            assert!(made.lines().all(|line| whole.contains(line)), "{shell}");
        }
    }
}
