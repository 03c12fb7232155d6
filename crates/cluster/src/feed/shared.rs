//! Values that pods share: many have equal labels, nodes and namespaces.

use std::{collections::HashSet, hash::Hash, sync::Arc};

use super::rows::{FeedPod, Labels, NamedPorts, size_of_labels, size_of_ports};

/// Unused values that need no cleanup.
const MIN_SHARED: usize = 1_024;
/// Bytes of a shared value: values of refused rows stay for a time.
const MAX_SHARED: usize = 4_096;

/// Each value once.
#[derive(Debug, Clone, Default)]
struct Values<V> {
    all: HashSet<V>,
    /// Count after the last cleanup.
    used: usize,
}

impl<T: ?Sized + Eq + Hash> Values<Arc<T>> {
    /// `size`: approximate bytes.
    fn share(&mut self, value: impl AsRef<T> + Into<Arc<T>>, size: usize) -> Arc<T> {
        if let Some(known) = self.all.get(value.as_ref()) {
            return Arc::clone(known);
        }
        let value = value.into();
        if size <= MAX_SHARED {
            if self.all.len() >= 2 * self.used + MIN_SHARED {
                self.all.retain(|value| Arc::strong_count(value) > 1);
                self.used = self.all.len();
            }
            self.all.insert(Arc::clone(&value));
        }
        value
    }
}

#[derive(Debug, Clone, Default)]
pub(super) struct Shared {
    /// Namespaces and nodes.
    names: Values<Arc<str>>,
    labels: Values<Arc<Labels>>,
    ports: Values<Arc<NamedPorts>>,
}

impl Shared {
    /// Replaces values by earlier equal ones.
    pub(super) fn pod(&mut self, pod: FeedPod) -> FeedPod {
        FeedPod {
            namespace: self.name(pod.namespace),
            node: self.name(pod.node),
            labels: self.labels(pod.labels),
            named_ports: self.ports(pod.named_ports),
            ..pod
        }
    }

    pub(super) fn name(&mut self, name: impl AsRef<str> + Into<Arc<str>>) -> Arc<str> {
        let size = name.as_ref().len();
        self.names.share(name, size)
    }

    pub(super) fn labels(&mut self, labels: Arc<Labels>) -> Arc<Labels> {
        let size = size_of_labels(&labels);
        self.labels.share(labels, size)
    }

    pub(super) fn ports(&mut self, ports: Arc<NamedPorts>) -> Arc<NamedPorts> {
        let size = size_of_ports(&ports);
        self.ports.share(ports, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_values_are_removed_and_large_ones_are_not_shared() {
        let mut shared = Shared::default();
        let held: Vec<Arc<str>> = (0..10).map(|n| shared.name(format!("held-{n}"))).collect();
        for n in 0..10 * MIN_SHARED {
            shared.name(format!("unused-{n}"));
            assert!(shared.names.all.len() <= MIN_SHARED + 2 * held.len());
        }
        assert!(held.iter().all(|name| Arc::ptr_eq(name, &shared.name(&**name))));
        let large = "x".repeat(MAX_SHARED + 1);
        assert!(!Arc::ptr_eq(&shared.name(large.as_str()), &shared.name(large.as_str())));
    }
}
