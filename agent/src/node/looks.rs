//! Permits for kernel look-ups that clients wait for.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent looks of a purpose. A look runs until the kernel answers, even without its client.
pub const LOOKS: usize = 4;

/// Purpose of a look. Purposes do not wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Explanation, or read of the flow tables: up to a second.
    Explanation,
    /// List of endpoints: a look-up for each link.
    List,
    /// One endpoint: one look-up. A CHECK starts with it.
    Endpoint,
}

/// The permits of each purpose.
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
    /// Waits for a permit, which is held during the look.
    pub(crate) async fn turn(&self, purpose: Purpose) -> Option<OwnedSemaphorePermit> {
        let permits = match purpose {
            Purpose::Explanation => &self.explanations,
            Purpose::List => &self.lists,
            Purpose::Endpoint => &self.endpoints,
        };
        // The semaphore is never closed.
        Arc::clone(permits).acquire_owned().await.ok()
    }
}
