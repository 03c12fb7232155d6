//! Listeners' rules in words.

use wharf_policy::requests::{HeaderRule, HttpRule, Pattern, Requests, ServerName};

/// One entry per rule, without header values, which may be secret.
#[must_use]
pub fn passes(requests: &Requests) -> Vec<String> {
    let names = requests.server_names.iter().map(|name| match name {
        ServerName::Exact(name) => format!("TLS to {name}"),
        ServerName::Under(name) => format!("TLS to **.{name}"),
    });
    let asked = requests.names.iter().map(|name| match name.as_str() {
        "*" => "DNS of every name".to_owned(),
        name => format!("DNS of {name}"),
    });
    requests.http.iter().map(http).chain(names).chain(asked).collect()
}

fn http(HttpRule { method, path, host, headers }: &HttpRule) -> String {
    let mut words = match (method, path) {
        (None, None) if host.is_none() && headers.is_empty() => return "every HTTP request".to_owned(),
        (None, None) => "every request".to_owned(),
        (Some(method), None) => pattern(method),
        (method, Some(path)) => {
            let method = method.as_ref().map_or_else(|| "any method".to_owned(), pattern);
            format!("{method} {}", pattern(path))
        }
    };
    if let Some(host) = host {
        words += &format!(", host {}", pattern(host));
    }
    for HeaderRule { name, value } in headers {
        words += &format!(", header {name}{}", if value.is_some() { " (of a value)" } else { "" });
    }
    words
}

fn pattern(pattern: &Pattern) -> String {
    match pattern {
        Pattern::Exact(text) => text.clone(),
        Pattern::Prefix(text) => format!("{text}..."),
        Pattern::Regex(text) => format!("matching {text}"),
    }
}

#[cfg(test)]
mod tests {
    use wharf_policy::names::NamePattern;

    use super::*;

    #[test]
    fn rules_are_told_and_values_of_headers_are_not() {
        let exact = |text: &str| Some(Pattern::Exact(text.to_owned()));
        let header = |name: &str, value: Option<&str>| HeaderRule { name: name.into(), value: value.map(Into::into) };
        let told = |rule: HttpRule| passes(&Requests { http: [rule].into(), ..Requests::default() }).concat();
        let any = HttpRule::default;
        assert_eq!(told(any()), "every HTTP request");
        assert_eq!(told(HttpRule { method: exact("GET"), ..any() }), "GET");
        let public = Some(Pattern::Prefix("/public".into()));
        assert_eq!(told(HttpRule { method: exact("GET"), path: public.clone(), ..any() }), "GET /public...");
        let host = Some(Pattern::Regex("a|b".into()));
        assert_eq!(told(HttpRule { path: public, host, ..any() }), "any method /public..., host matching a|b");
        let headers = [header("x-any", None), header("x-token", Some("secret"))].into();
        assert_eq!(told(HttpRule { headers, ..any() }), "every request, header x-any, header x-token (of a value)");
        let server_names = [ServerName::Exact("a.test".into()), ServerName::Under("b.test".into())].into();
        let tls = Requests { server_names, ..Requests::default() };
        assert_eq!(passes(&tls), ["TLS to a.test", "TLS to **.b.test"]);
        let names = ["*", "*.a.test"].map(|name| NamePattern::pattern(name).expect("pattern")).into();
        let dns = Requests { names, ..Requests::default() };
        assert_eq!(passes(&dns), ["DNS of every name", "DNS of *.a.test"]);
    }
}
