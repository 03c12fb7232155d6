//! `wharf config`.

use wharf_api::AgentConfigView;

use super::{
    Style,
    table::{cell, table, token},
};

/// Every setting; those that can change while the agent runs are marked.
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
        insta::assert_snapshot!(list(&view, &Style::plain()), @r"
        SETTING    VALUE                                               FROM      CHANGES AT RUN TIME
        log-level  info                                                run time  yes
        node-name  k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row  -         no
        ");
    }
}
