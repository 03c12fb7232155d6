//! Orphans and failed undos.

use std::{net::IpAddr, sync::Arc};

use wharf_core::{
    ids::{Attachment, Epoch},
    kernel::LinkRef,
    plan::UndoStep,
};

use crate::node::endpoint::Shared;

/// An endpoint without a record.
#[derive(Debug, Clone)]
pub struct Orphan {
    pub link: LinkRef,
    /// From the link's mark.
    pub attachment: Option<Attachment>,
    /// In `ENDPOINTS`.
    pub rows: Vec<(IpAddr, Epoch)>,
    /// Leased under the link's name.
    pub held: Vec<IpAddr>,
}

/// Failed undos.
#[derive(Debug, Clone)]
pub enum Unfinished {
    /// A prepared set.
    Programs,
    Create(Box<Remains>),
}

/// Remaining steps of a create's undo.
#[derive(Debug, Clone)]
pub struct Remains {
    pub(crate) shared: Arc<Shared>,
    pub(crate) undos: Vec<UndoStep>,
}
