//! `wharf config`.

use wharf_api::AgentConfigView;

use super::{
    Style,
    table::{cell, table, token},
    text,
};

pub(crate) fn list(view: &AgentConfigView, style: &Style) -> String {
    let rows = view
        .effective
        .iter()
        .map(|(key, value)| {
            let mutable = if view.mutable.contains(key) { "yes" } else { "no" };
            let origin = view.origin.get(key).map_or("-", |origin| origin.as_str());
            vec![token(key), cell(value), token(origin), token(mutable)]
        })
        .collect();
    table(style, &["SETTING", "VALUE", "FROM", "CHANGES AT RUN TIME"], rows)
}

pub(crate) fn changes(names: &[&str], before: &AgentConfigView, after: &AgentConfigView) -> String {
    let line = |name: &&str| {
        let value =
            |view: &AgentConfigView| view.effective.get(*name).map_or_else(|| "-".to_owned(), |v| text::safe(v));
        let (old, new) = (value(before), value(after));
        if old == new { format!("{name}: {new} (as before)\n") } else { format!("{name}: {old} -> {new}\n") }
    };
    names.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use wharf_api::SettingOrigin;

    use super::*;
    use crate::render::sample::HOSTILE;

    #[test]
    fn settings() {
        let pairs = [("log-level", "info"), ("node-name", HOSTILE)];
        let view = AgentConfigView {
            effective: pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            mutable: vec!["log-level".to_owned()],
            origin: [("log-level".to_owned(), SettingOrigin::RunTime)].into(),
        };
        let mut after = view.clone();
        after.effective.insert("log-level".to_owned(), "debug".to_owned());
        let told = changes(&["node-name", "log-level"], &view, &after);
        let hostile = "k8s:app=\\u{1b}[2J\\u{9b}31m\\u{202e}evil\\r\\nfake row";
        assert_eq!(told, format!("node-name: {hostile} (as before)\nlog-level: info -> debug\n"));
        insta::assert_snapshot!(list(&view, &Style::plain()), @r"
        SETTING    VALUE                                               FROM      CHANGES AT RUN TIME
        log-level  info                                                run time  yes
        node-name  k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row  -         no
        ");
    }
}
