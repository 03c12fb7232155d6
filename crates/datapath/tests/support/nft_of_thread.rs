//! The table in the namespace of the calling thread, which a test never leaves.

use wharf_core::{
    kernel::Result,
    nat::{Nat, PortMapping},
};
use wharf_datapath::nft::{Ensured, Nft, Table};

thread_local! {
    static NFT: Nft = Nft::default();
}

pub(crate) fn ensure(nat: &Nat) -> Result<Ensured> {
    NFT.with(|nft| nft.ensure(nat))
}

pub(crate) fn add_mappings(mappings: &[PortMapping]) -> Result<()> {
    NFT.with(|nft| nft.add_mappings(mappings))
}

pub(crate) fn remove_mappings(mappings: &[PortMapping]) -> Result<()> {
    NFT.with(|nft| nft.remove_mappings(mappings))
}

pub(crate) fn look() -> Result<Option<Table>> {
    NFT.with(Nft::look)
}

pub(crate) fn remove() -> Result<bool> {
    NFT.with(Nft::remove)
}
