//! `wharf namespace list`.

use wharf_api::Namespace;

use super::{
    Style,
    table::{cell, table, token},
    text::safe,
};

pub(crate) fn list(namespaces: &[Namespace], style: &Style) -> String {
    let row = |namespace: &Namespace| vec![token(&namespace.name), cell(labels(namespace))];
    table(style, &["NAME", "LABELS"], namespaces.iter().map(row).collect())
}

pub(crate) fn labelled(namespace: &Namespace) -> String {
    format!("{}: {}\n", safe(&namespace.name), safe(&labels(namespace)))
}

fn labels(namespace: &Namespace) -> String {
    let labels: Vec<String> = namespace.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    if labels.is_empty() { "-".to_owned() } else { labels.join(" ") }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::render::sample::HOSTILE;

    #[test]
    fn namespaces_have_a_line_each() {
        let namespace = |name: &str, labels: &[(&str, &str)]| {
            let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            Namespace { name: name.to_owned(), labels: labels.collect::<BTreeMap<_, _>>() }
        };
        let all = [
            namespace("default", &[]),
            namespace("shop", &[("kubernetes.io/metadata.name", "shop"), ("team", "a"), ("stage", "")]),
            namespace("evil", &[("x", HOSTILE)]),
        ];
        insta::assert_snapshot!(list(&all, &Style::plain()), @r"
        NAME     LABELS
        default  -
        shop     kubernetes.io/metadata.name=shop stage= team=a
        evil     x=k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row
        ");
        insta::assert_snapshot!(list(&[], &Style::plain()), @"NAME  LABELS");
    }
}
