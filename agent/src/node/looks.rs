//! Permits for clients' reads of the kernel.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent reads of one purpose. A read runs until the kernel answers, even without its client.
pub const LOOKS: usize = 4;

/// Purposes do not wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Explanation or flow tables: up to a second.
    Explanation,
    /// A look-up for each link.
    List,
    /// One endpoint, as a CHECK reads it first.
    Endpoint,
}

/// By purpose.
#[derive(Debug)]
pub struct Looks {
    explanations: Arc<Semaphore>,
    lists: Arc<Semaphore>,
    endpoints: Arc<Semaphore>,
}

impl Default for Looks {
    fn default() -> Self {
        let [explanations, lists, endpoints] = [(); 3].map(|()| Arc::new(Semaphore::new(LOOKS)));
        Self { explanations, lists, endpoints }
    }
}

impl Looks {
    pub(crate) async fn turn(&self, purpose: Purpose) -> Option<OwnedSemaphorePermit> {
        let permits = match purpose {
            Purpose::Explanation => &self.explanations,
            Purpose::List => &self.lists,
            Purpose::Endpoint => &self.endpoints,
        };
        Arc::clone(permits).acquire_owned().await.ok()
    }
}
