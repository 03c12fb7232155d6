//! HTTP rules as routes, and a last route that denies. (A filter, RBAC, is slower.)

use envoy_types::pb::envoy::config::{
    core::v3::{DataSource, data_source},
    route::v3::{
        DirectResponseAction, HeaderMatcher, Route, RouteAction, RouteConfiguration, RouteMatch, VirtualHost,
        header_matcher::HeaderMatchSpecifier, route, route_action::ClusterSpecifier, route_match::PathSpecifier,
    },
};
use envoy_types::pb::envoy::r#type::matcher::v3::{RegexMatcher, StringMatcher, string_matcher::MatchPattern};
use wharf_policy::requests::{HttpRule, Pattern, Requests};

use super::{ORIGINAL_DESTINATION, forwarded_proto, http, no, seconds};

const DENIED: &str = "Access denied\r\n";

pub(super) fn routes(requests: &Requests) -> RouteConfiguration {
    let server = RouteAction {
        cluster_specifier: Some(ClusterSpecifier::Cluster(ORIGINAL_DESTINATION.into())),
        timeout: seconds(0),
        ..RouteAction::default()
    };
    let denied = DirectResponseAction {
        status: 403,
        body: Some(DataSource {
            specifier: Some(data_source::Specifier::InlineString(DENIED.into())),
            ..DataSource::default()
        }),
        ..DirectResponseAction::default()
    };
    let allowed = requests.http.iter().filter_map(matchers);
    let mut routes: Vec<_> = allowed.map(|headers| route(headers, route::Action::Route(server.clone()))).collect();
    routes.push(route(Vec::new(), route::Action::DirectResponse(denied)));
    let any = VirtualHost { name: "any".into(), domains: vec!["*".into()], routes, ..VirtualHost::default() };
    forwarded_proto::put_back(RouteConfiguration {
        virtual_hosts: vec![any],
        request_headers_to_remove: vec![http::ADDED.into()],
        // A listener can precede its cluster.
        validate_clusters: no(),
        ..RouteConfiguration::default()
    })
}

fn route(headers: Vec<HeaderMatcher>, action: route::Action) -> Route {
    let every_path = Some(PathSpecifier::Prefix("/".into()));
    Route {
        r#match: Some(RouteMatch { path_specifier: every_path, headers, ..RouteMatch::default() }),
        action: Some(action),
        ..Route::default()
    }
}

/// `None` if no request can match.
fn matchers(rule: &HttpRule) -> Option<Vec<HeaderMatcher>> {
    let pseudo = [(":method", &rule.method), (":path", &rule.path), (":authority", &rule.host)];
    let pseudo =
        pseudo.into_iter().filter_map(|(name, pattern)| Some(Some(matcher(name, specifier(pattern.as_ref()?)))));
    let headers = rule.headers.iter().map(|wanted| {
        let specifier = match &wanted.value {
            Some(value) => matching(MatchPattern::Exact(value.clone())),
            None => HeaderMatchSpecifier::PresentMatch(true),
        };
        Some(matcher(forwarded_proto::place(&wanted.name)?, specifier))
    });
    pseudo.chain(headers).collect()
}

fn matcher(name: &str, specifier: HeaderMatchSpecifier) -> HeaderMatcher {
    HeaderMatcher { name: name.into(), header_match_specifier: Some(specifier), ..HeaderMatcher::default() }
}

/// Envoy rejects an empty prefix or expression.
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

    use wharf_policy::requests::HeaderRule;

    use super::*;

    fn wanted(rules: impl IntoIterator<Item = HttpRule>) -> Vec<(Vec<String>, bool)> {
        let requests = Requests { http: BTreeSet::from_iter(rules), ..Requests::default() };
        let mut hosts = routes(&requests).virtual_hosts;
        assert_eq!(hosts.len(), 1);
        let told = |route: Route| {
            let names = route.r#match.expect("a match").headers.into_iter().map(|header| header.name);
            (names.collect(), matches!(route.action, Some(route::Action::Route(_))))
        };
        hosts.remove(0).routes.into_iter().map(told).collect()
    }

    fn header(name: &str) -> HttpRule {
        HttpRule { headers: BTreeSet::from([HeaderRule { name: name.into(), value: None }]), ..HttpRule::default() }
    }

    #[test]
    fn no_rules_deny_all() {
        assert_eq!(wanted([]), [(Vec::new(), false)]);
    }

    #[test]
    fn an_empty_rule_allows_all_and_an_empty_pattern_is_never_sent() {
        assert_eq!(wanted([HttpRule::default()]), [(Vec::new(), true), (Vec::new(), false)]);
        assert_eq!(specifier(&Pattern::Prefix(String::new())), HeaderMatchSpecifier::PresentMatch(true));
        assert_eq!(specifier(&Pattern::Regex(String::new())), matching(MatchPattern::Exact(String::new())));
    }

    #[test]
    fn all_fields_of_a_rule_must_hold() {
        let rule = HttpRule {
            method: Some(Pattern::Exact("GET".into())),
            path: Some(Pattern::Prefix("/a".into())),
            ..header("x-key")
        };
        let names = [":method", ":path", "x-key"].map(str::to_owned).to_vec();
        assert_eq!(wanted([rule]), [(names, true), (Vec::new(), false)]);
    }

    #[test]
    fn a_header_that_is_set_aside_is_judged_where_it_is_and_its_place_is_nobodys() {
        let aside = "x-wharf-forwarded-proto";
        assert_eq!(wanted([header("x-forwarded-proto")]), [(vec![aside.to_owned()], true), (Vec::new(), false)]);
        assert_eq!(wanted([header(aside)]), [(Vec::new(), false)], "the client's own is dropped: nothing matches");
    }
}
