//! The results table.

use super::{
    Run,
    guest::{Told, Verdict},
};

/// By names of `wharf status`.
const FEATURES: [&str; 5] = ["tcx", "netkit", "redirect-peer", "btf", "netns-cookie"];

pub(crate) fn summary(told: &Told) -> String {
    let without = match told.count(Verdict::NoTcx) {
        0 => String::new(),
        tests => format!(", {tests} need tcx"),
    };
    format!("{} passed, {} failed{without}", told.count(Verdict::Passed), told.count(Verdict::Failed))
}

pub(crate) fn render(runs: &[Run]) -> String {
    let mut heads = vec!["kernel", "tests", "passed", "failed", "need tcx", "seconds"];
    heads.extend(FEATURES);
    heads.extend(["attach mode", "links"]);
    let mut rows: Vec<Vec<String>> = vec![heads.into_iter().map(str::to_owned).collect()];
    rows.extend(runs.iter().map(row));
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0);
    let line = |row: &Vec<String>| {
        let cells: Vec<_> =
            row.iter().enumerate().map(|(column, cell)| format!("{cell:<width$}", width = width(column))).collect();
        cells.join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn row(run: &Run) -> Vec<String> {
    let told = &run.told;
    let release = if told.release.is_empty() { run.wanted.version } else { told.release.as_str() };
    let counts =
        [told.tests.len(), told.count(Verdict::Passed), told.count(Verdict::Failed), told.count(Verdict::NoTcx)];
    let mut cells = vec![release.to_owned()];
    cells.extend(counts.map(|count| count.to_string()));
    cells.push(run.seconds.to_string());
    cells.extend(FEATURES.map(|name| match told.features.get(name) {
        Some(true) => "yes".to_owned(),
        Some(false) => "no".to_owned(),
        None => "?".to_owned(),
    }));
    let mode = |mode: &str| if mode.is_empty() { "?".to_owned() } else { mode.to_owned() };
    cells.extend([mode(&told.attach_mode), mode(&told.device_mode)]);
    cells
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{args::VmKernel, vm::kernel};

    #[test]
    fn columns_line_up_and_what_is_unknown_says_so() {
        let mut told = Told::default();
        for line in [
            "@kernel 6.1.0-50-cloud-amd64",
            r#"@status {"kernel":{"attach_mode":"clsact","features":{"tcx":false,"btf":true}}}"#,
            "@end a b 0 5",
            "@end a c 101 5",
        ] {
            told.on_line(line);
        }
        assert_eq!(summary(&told), "1 passed, 1 failed");
        let text = render(&[Run { wanted: kernel::release(VmKernel::V6_1), told, planned: 1, seconds: 12 }]);
        assert_eq!(
            text,
            "kernel                tests  passed  failed  need tcx  seconds  tcx  netkit  redirect-peer  btf  \
             netns-cookie  attach mode  links\n\
             6.1.0-50-cloud-amd64  2      1       1       0         12       no   ?       ?              yes  \
             ?             clsact       ?"
        );
    }
}
