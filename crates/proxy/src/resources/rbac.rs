//! Rules for HTTP requests as Envoy's RBAC filter.

use std::collections::HashMap;

use envoy_types::pb::envoy::{
    config::{
        rbac::v3::{Permission, Policy, Principal, Rbac as Rules, permission, principal, rbac::Action},
        route::v3::{HeaderMatcher, header_matcher::HeaderMatchSpecifier},
    },
    extensions::filters::http::rbac::v3::Rbac,
    r#type::matcher::v3::{RegexMatcher, StringMatcher, string_matcher::MatchPattern},
};
use wharf_policy::requests::{HttpRule, Pattern, Requests};

/// The filter: what no rule allows is denied, and without rules that is everything.
pub(super) fn filter(requests: &Requests) -> Rbac {
    let mut policies = HashMap::new();
    // One policy for all rules: the order of a map's entries is not kept, and the resource must be the same each time.
    if !requests.http.is_empty() {
        let anyone = Principal { identifier: Some(principal::Identifier::Any(true)) };
        let permissions = requests.http.iter().map(permission).collect();
        policies.insert("allowed".into(), Policy { permissions, principals: vec![anyone], ..Policy::default() });
    }
    Rbac { rules: Some(Rules { action: Action::Allow.into(), policies, ..Rules::default() }), ..Rbac::default() }
}

fn permission(rule: &HttpRule) -> Permission {
    let pseudo = [(":method", &rule.method), (":path", &rule.path), (":authority", &rule.host)];
    let mut rules: Vec<_> = pseudo
        .into_iter()
        .filter_map(|(name, pattern)| Some(header(name, specifier(pattern.as_ref()?))))
        .chain(rule.headers.iter().map(|wanted| {
            header(
                &wanted.name,
                match &wanted.value {
                    Some(value) => matching(MatchPattern::Exact(value.clone())),
                    None => HeaderMatchSpecifier::PresentMatch(true),
                },
            )
        }))
        .collect();
    // A set must not be empty.
    match rules.len() {
        0 => Permission { rule: Some(permission::Rule::Any(true)) },
        1 => rules.remove(0),
        _ => Permission { rule: Some(permission::Rule::AndRules(permission::Set { rules })) },
    }
}

fn header(name: &str, specifier: HeaderMatchSpecifier) -> Permission {
    let matcher =
        HeaderMatcher { name: name.into(), header_match_specifier: Some(specifier), ..HeaderMatcher::default() };
    Permission { rule: Some(permission::Rule::Header(matcher)) }
}

/// Envoy refuses an empty prefix and an empty expression; what they mean has other words.
fn specifier(pattern: &Pattern) -> HeaderMatchSpecifier {
    match pattern {
        Pattern::Exact(text) => matching(MatchPattern::Exact(text.clone())),
        Pattern::Prefix(text) if text.is_empty() => HeaderMatchSpecifier::PresentMatch(true),
        Pattern::Prefix(text) => matching(MatchPattern::Prefix(text.clone())),
        Pattern::Regex(text) if text.is_empty() => matching(MatchPattern::Exact(String::new())),
        Pattern::Regex(text) => {
            matching(MatchPattern::SafeRegex(RegexMatcher { regex: text.clone(), ..RegexMatcher::default() }))
        }
    }
}

const fn matching(pattern: MatchPattern) -> HeaderMatchSpecifier {
    HeaderMatchSpecifier::StringMatch(StringMatcher { ignore_case: false, match_pattern: Some(pattern) })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn requests(rules: impl IntoIterator<Item = HttpRule>) -> Requests {
        Requests { http: BTreeSet::from_iter(rules), ..Requests::default() }
    }

    #[test]
    fn no_rules_deny_all() {
        let rules = filter(&Requests::default()).rules.expect("rules");
        assert_eq!(rules.action, i32::from(Action::Allow), "what no policy names is denied");
        assert!(rules.policies.is_empty());
    }

    #[test]
    fn an_empty_rule_allows_all_and_an_empty_pattern_is_never_sent() {
        let rules = filter(&requests([HttpRule::default()])).rules.expect("rules");
        assert_eq!(rules.policies["allowed"].permissions, [Permission { rule: Some(permission::Rule::Any(true)) }]);
        assert_eq!(specifier(&Pattern::Prefix(String::new())), HeaderMatchSpecifier::PresentMatch(true));
        assert_eq!(specifier(&Pattern::Regex(String::new())), matching(MatchPattern::Exact(String::new())));
    }

    #[test]
    fn all_fields_of_a_rule_must_hold() {
        let rule = HttpRule {
            method: Some(Pattern::Exact("GET".into())),
            path: Some(Pattern::Prefix("/a".into())),
            ..HttpRule::default()
        };
        let Some(permission::Rule::AndRules(set)) = permission(&rule).rule else { panic!("a set of rules") };
        assert_eq!(set.rules.len(), 2);
    }
}
