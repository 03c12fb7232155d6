//! Rows of this node's pods, and their match with endpoints.

use std::{
    collections::{BTreeMap, BTreeSet},
    num::NonZeroU16,
    sync::Arc,
};

use wharf_core::{endpoint::PodRow, identity::Label, ids::PortName, policy::NamedPort};

use super::FeedPod;

/// Length of a Kubernetes API uid.
const UID: usize = 36;

/// A pod as its endpoint knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodRef<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    /// From the runtime.
    pub uid: Option<&'a str>,
    /// Uid of the endpoint's row.
    pub row: Option<&'a str>,
}

/// Rows of this node's pods.
#[derive(Debug, Clone, Default)]
pub struct OwnPods {
    by_uid: BTreeMap<Arc<str>, Arc<FeedPod>>,
    /// Namespace, name and uid of each row.
    names: BTreeSet<[Arc<str>; 3]>,
}

fn names_of(pod: &FeedPod) -> [Arc<str>; 3] {
    [&pod.namespace, &pod.name, &pod.uid].map(Arc::clone)
}

impl OwnPods {
    /// Puts a row; `None` removes it.
    pub fn put(&mut self, uid: &str, pod: Option<Arc<FeedPod>>) {
        if let Some(pod) = self.by_uid.remove(uid) {
            self.names.remove(&names_of(&pod));
        }
        if let Some(pod) = pod {
            self.names.insert(names_of(&pod));
            self.by_uid.insert(Arc::clone(&pod.uid), pod);
        }
    }

    /// A row by uid.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<&Arc<FeedPod>> {
        self.by_uid.get(uid)
    }

    /// The row by uid, else the only row with the pod's namespace and name. A pod with an API uid never gets its
    /// successor's row, and an endpoint without a uid keeps its first row. A static pod's uid is a hash; the kubelet
    /// may replace its object, thus its row, under the same name.
    #[must_use]
    pub fn row_of(&self, pod: PodRef<'_>) -> Option<&Arc<FeedPod>> {
        if let Some(row) = pod.row.into_iter().chain(pod.uid).find_map(|uid| self.by_uid.get(uid)) {
            return Some(row);
        }
        let is_final = pod.uid.map_or(pod.row.is_some(), is_of_api);
        if is_final { None } else { self.only_row(pod.namespace, pod.name) }
    }

    fn only_row(&self, namespace: &str, name: &str) -> Option<&Arc<FeedPod>> {
        let first = [namespace, name, ""].map(Arc::from);
        let is_named = |[of, named, _]: &&[Arc<str>; 3]| (&**of, &**named) == (namespace, name);
        let mut named = self.names.range(first..).take_while(is_named);
        match (named.next(), named.next()) {
            (Some([_, _, uid]), None) => self.by_uid.get(uid),
            _ => None,
        }
    }
}

fn is_of_api(uid: &str) -> bool {
    let fits = |(at, byte): (usize, u8)| {
        if matches!(at, 8 | 13 | 18 | 23) { byte == b'-' } else { byte.is_ascii_hexdigit() }
    };
    uid.len() == UID && uid.bytes().enumerate().all(fits)
}

impl From<&FeedPod> for PodRow {
    fn from(pod: &FeedPod) -> Self {
        let label = |(key, value): (&String, &String)| Label {
            source: "k8s".to_owned(),
            key: key.clone(),
            value: value.clone(),
        };
        let ports = pod.named_ports.iter().filter_map(|((protocol, name), port)| {
            let port = NamedPort { port: NonZeroU16::new(*port)?, protocol: *protocol };
            Some((PortName::parse(name).ok()?, port))
        });
        Self { uid: pod.uid.to_string(), labels: pod.labels.iter().map(label).collect(), named_ports: ports.collect() }
    }
}

#[cfg(test)]
mod tests {
    use wharf_core::nat::Protocol;

    use super::*;

    const UID_1: &str = "6f1c1f9e-3b0a-4a8e-9d57-0a4f5a0c1d2e";
    const UID_2: &str = "0b7d2c44-91aa-4f0e-8a11-5d0e6f7a8b9c";
    /// A static pod's uid.
    const HASH: &str = "4c3a1f0e9b8d7c6a5f4e3d2c1b0a9f8e";

    fn pod(uid: &str, name: &str) -> FeedPod {
        FeedPod {
            uid: uid.into(),
            namespace: "shop".into(),
            name: name.into(),
            addresses: [].into(),
            node: "a".into(),
            labels: BTreeMap::from([("app".to_owned(), "web".to_owned())]).into(),
            named_ports: BTreeMap::from([((Protocol::Tcp, "http".to_owned()), 80)]).into(),
        }
    }

    fn rows(pods: &[(&str, &str)]) -> OwnPods {
        let mut rows = OwnPods::default();
        for (uid, name) in pods {
            rows.put(uid, Some(pod(uid, name).into()));
        }
        rows
    }

    fn web<'a>(uid: Option<&'a str>, row: Option<&'a str>) -> PodRef<'a> {
        PodRef { namespace: "shop", name: "web", uid, row }
    }

    #[test]
    fn a_pod_with_a_uid_of_the_api_has_the_row_of_this_uid_alone() {
        let both = rows(&[(UID_1, "web"), (UID_2, "web")]);
        let found = |rows: &OwnPods, pod| rows.row_of(pod).map(|row| row.uid.clone());
        assert_eq!(found(&both, web(Some(UID_2), None)).as_deref(), Some(UID_2));
        let successor = rows(&[(UID_2, "web")]);
        assert_eq!(found(&successor, web(Some(UID_1), None)), None);
        assert_eq!(found(&successor, web(Some(UID_1), Some(UID_1))), None);
    }

    #[test]
    fn other_pods_have_the_only_row_of_their_name() {
        let found = |rows: &OwnPods, pod| rows.row_of(pod).map(|row| row.uid.clone());
        let one = rows(&[(UID_1, "web"), (UID_2, "web-2"), ("x", "w")]);
        for uid in [None, Some(HASH)] {
            assert_eq!(found(&one, web(uid, None)).as_deref(), Some(UID_1), "{uid:?}");
            assert_eq!(found(&rows(&[(UID_1, "web"), (UID_2, "web")]), web(uid, None)), None, "{uid:?}");
        }
        let other = PodRef { namespace: "store", ..web(None, None) };
        assert_eq!(found(&one, other), None);
        let next = rows(&[(UID_2, "web")]);
        assert_eq!(found(&next, web(Some(HASH), Some(UID_1))).as_deref(), Some(UID_2));
        assert_eq!(found(&next, web(None, Some(UID_1))), None);
        let both = rows(&[(UID_1, "web"), (UID_2, "web")]);
        assert_eq!(found(&both, web(Some(HASH), Some(UID_1))).as_deref(), Some(UID_1));
    }

    #[test]
    fn a_row_that_is_replaced_or_removed_leaves_nothing() {
        let mut own = rows(&[(UID_1, "web")]);
        own.put(UID_1, Some(pod(UID_1, "db").into()));
        assert_eq!(own.row_of(web(None, None)), None);
        own.put(UID_1, None);
        assert!(own.get(UID_1).is_none() && own.names.is_empty());
    }

    #[test]
    fn a_row_gives_labels_of_kubernetes_and_named_ports() {
        let row = PodRow::from(&pod(UID_1, "web"));
        let shown: Vec<String> = row.labels.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["k8s:app=web"]);
        let ports: Vec<(&str, u16)> =
            row.named_ports.iter().map(|(name, port)| (name.as_str(), port.port.get())).collect();
        assert_eq!(ports, [("http", 80)]);
    }
}
