//! Leftovers of endpoints: orphans, and undos that failed.

use std::{net::IpAddr, sync::Arc};

use wharf_core::{
    ids::{Attachment, Epoch},
    kernel::LinkRef,
    plan::UndoStep,
};

use crate::node::endpoint::Shared;

/// An orphan: an endpoint without a record.
#[derive(Debug, Clone)]
pub struct Orphan {
    /// Its link.
    pub link: LinkRef,
    /// The attachment, if the link's mark names one.
    pub attachment: Option<Attachment>,
    /// Rows of the shared endpoint table.
    pub rows: Vec<(IpAddr, Epoch)>,
    /// Addresses that are leased under the name of its link.
    pub held: Vec<IpAddr>,
}

/// What an unfinished undo still has to remove.
#[derive(Debug, Clone)]
pub enum Unfinished {
    /// Programs that were loaded ahead of need.
    Programs,
    /// A create.
    Create(Box<Remains>),
}

/// The remaining steps of the undo of a create.
#[derive(Debug, Clone)]
pub struct Remains {
    pub(crate) shared: Arc<Shared>,
    pub(crate) undos: Vec<UndoStep>,
}
