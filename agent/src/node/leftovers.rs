//! What endpoints have left over: an endpoint whose record was lost, a create whose undo failed.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use wharf_core::{
    ids::{Attachment, Epoch},
    kernel::LinkRef,
    plan::UndoStep,
};

use crate::node::endpoint::Shared;

/// An endpoint without a record.
#[derive(Debug, Clone)]
pub struct Orphan {
    /// Its link.
    pub link: LinkRef,
    /// Whose it is, where the link's mark says it.
    pub attachment: Option<Attachment>,
    /// Its rows of the shared table.
    pub rows: Vec<(IpAddr, Epoch)>,
    /// Addresses that are leased under the name of its link.
    pub held: Vec<IpAddr>,
}

impl Orphan {
    /// One of its addresses is in none of these pools: the gateway that its container routes by went with the pool.
    #[must_use]
    pub fn lost_gateway(&self, pools: &[IpNet]) -> bool {
        self.rows.iter().any(|(ip, _)| !pools.iter().any(|pool| pool.contains(ip)))
    }
}

/// What is to be undone.
#[derive(Debug, Clone)]
pub enum Unfinished {
    /// Programs that were loaded ahead of need.
    Programs,
    /// A create.
    Create(Box<Remains>),
}

/// What the undo of a create has not taken back.
#[derive(Debug, Clone)]
pub struct Remains {
    pub(crate) shared: Arc<Shared>,
    pub(crate) undos: Vec<UndoStep>,
}
