//! Permits for looks at the kernel that clients wait for.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Looks of one purpose that may run at once. A look continues until the kernel answers, even when its client went
/// away.
pub const LOOKS: usize = 4;

/// What a look is for. Looks for different purposes do not wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// An explanation, or a read of the flow tables, which may take a second.
    Explanation,
    /// A list of endpoints: one lookup for each link.
    List,
    /// One endpoint: one lookup. A CHECK begins with it.
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
    /// Waits until a look may run. The permit is held to its end.
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
