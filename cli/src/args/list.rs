//! Options shared by list commands.

use std::{convert::Infallible, str::FromStr};

use clap::Args;
use wharf_api::Endpoint;

use crate::{namespace::namespace_of, selector::Selector};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamespaceName(pub(crate) String);

impl FromStr for NamespaceName {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

/// Whether a list is followed.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct Follow {
    /// Show it again after each change, until interrupted or until the agent ends. Looks once a second.
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// Which endpoints are shown.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Choice {
    /// Of this namespace. A container that is no pod is in the namespace of its label, else in `default`.
    #[arg(short, long, value_name = "NAMESPACE")]
    pub(crate) namespace: Option<NamespaceName>,
    /// With these labels, as kubectl selects: app=web, tier!=db, 'env in (a,b)', app, '!app', with commas between. A
    /// key may have its source in front: k8s:app=web.
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    pub(crate) selector: Option<Selector>,
}

impl Choice {
    pub(crate) fn has(&self, e: &Endpoint) -> bool {
        self.namespace.as_ref().is_none_or(|namespace| namespace.0 == namespace_of(e))
            && self.selector.as_ref().is_none_or(|s| s.matches(e.labels.iter().map(String::as_str)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::sample;

    #[test]
    fn all_that_is_given_must_hold() {
        let e = sample::endpoint();
        for (namespace, selector, wanted) in [
            (None, None, true),
            (Some("default"), None, true),
            (Some("shop"), None, false),
            (None, Some("app=web"), true),
            (Some("default"), Some("app=db"), false),
            (Some("shop"), Some("app=web"), false),
        ] {
            let selector = selector.map(|text: &str| text.parse::<Selector>().unwrap());
            let choice = Choice { namespace: namespace.map(|name: &str| NamespaceName(name.to_owned())), selector };
            assert_eq!(choice.has(&e), wanted, "{choice:?}");
        }
    }
}
