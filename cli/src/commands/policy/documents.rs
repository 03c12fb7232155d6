//! Parses policy documents.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use wharf_api::PolicyImport;
use wharf_policy::{
    model::{Origin, Policy, PolicyName},
    read::{Refusal, read},
};

use super::file;
use crate::{
    error::{CliError, Exit},
    output::{Output, remark},
    render::{
        policy::{Row, list},
        text::{count, safe},
    },
};

#[derive(Debug, Default)]
struct Checked {
    rows: Vec<Row>,
    places: BTreeMap<PolicyName, Origin>,
}

impl Checked {
    /// Rejects policy names in two files as ambiguous.
    fn add(&mut self, policies: &[Policy]) -> Result<(), Vec<Refusal>> {
        let mut own: BTreeMap<&PolicyName, &Origin> = BTreeMap::new();
        for policy in policies {
            own.entry(&policy.name).or_insert(&policy.origin);
        }
        let twice = own.iter().filter_map(|(name, origin)| {
            let first = self.places.get(*name)?;
            Some(Refusal::Field {
                origin: (*origin).clone(),
                reason: format!("the policy is in another file too: {}:{}", first.file, first.line),
                remedy: "remove or rename one of them".to_owned(),
            })
        });
        let twice: Vec<_> = twice.collect();
        if !twice.is_empty() {
            return Err(twice);
        }
        self.places.extend(own.into_iter().map(|(name, origin)| (name.clone(), origin.clone())));
        self.rows.extend(policies.iter().map(Row::from));
        Ok(())
    }
}

/// Shows no policies if any is refused, because a partial list misleads.
pub(super) fn validate(out: &Output, paths: &[PathBuf]) -> Result<Exit, CliError> {
    let rows = read_all("validate policies", paths, |_| ())?;
    out.emit(&rows, |style| list(&rows, style))?;
    Ok(Exit::Ok)
}

/// Policies of all files; writes reasons for refusals to standard error. `taken` gets each valid file with policies,
/// also when another file fails.
pub(super) fn read_all(
    operation: &str,
    paths: &[PathBuf],
    mut taken: impl FnMut(PolicyImport),
) -> Result<Vec<Row>, CliError> {
    if paths.iter().filter(|path| file::is_standard_input(path)).count() > 1 {
        return Err(
            CliError::usage("read policies: `-` is there twice").hint("standard input is read once; write `-` once")
        );
    }
    let mut checked = Checked::default();
    let (mut all, mut refused) = (0, 0);
    for path in paths {
        let files = file::expand(path);
        // An unusable directory counts as a file.
        all += files.as_ref().map_or(1, Vec::len);
        let results = match files {
            Ok(files) => files.iter().map(|file| check(&mut checked, file, &mut taken)).collect(),
            Err(error) => vec![Err(vec![error.to_string()])],
        };
        for reason in results.into_iter().filter_map(Result::err) {
            refused += 1;
            reason.iter().for_each(|line| remark(&safe(line)));
        }
    }
    if refused > 0 {
        let all = count(u64::try_from(all).unwrap_or(u64::MAX), "file");
        return Err(CliError::refused(format!("{operation}: {refused} of {all} refused")));
    }
    Ok(checked.rows)
}

/// Errors have one line per reason.
fn check(checked: &mut Checked, path: &Path, taken: &mut impl FnMut(PolicyImport)) -> Result<(), Vec<String>> {
    let lines = |refusals: Vec<Refusal>| refusals.iter().map(ToString::to_string).collect::<Vec<_>>();
    let text = file::text(path).map_err(|error| vec![error.to_string()])?;
    let name = file::name(path);
    let policies = read(&name, &text).map_err(lines)?;
    if policies.is_empty() {
        remark(&safe(&format!("{name}: there is no policy in it")));
        return Ok(());
    }
    checked.add(&policies).map_err(lines)?;
    taken(PolicyImport { file: name, text });
    Ok(())
}
