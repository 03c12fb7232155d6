//! The table in the namespace of the calling thread, which a test never leaves.

use wharf_core::{
    kernel::Result,
    nat::{Nat, NatEntry, PortMapping},
};
use wharf_datapath::nft::{Ensured, Nft, Table};

thread_local! {
    static NFT: Nft = Nft::default();
}

fn entries(mappings: &[PortMapping]) -> Vec<NatEntry> {
    mappings.iter().copied().map(NatEntry::Port).collect()
}

pub(crate) fn ensure(nat: &Nat) -> Result<Ensured> {
    NFT.with(|nft| nft.ensure(nat))
}

pub(crate) fn add_mappings(mappings: &[PortMapping]) -> Result<()> {
    NFT.with(|nft| nft.add(&entries(mappings)))
}

pub(crate) fn remove_mappings(mappings: &[PortMapping]) -> Result<()> {
    NFT.with(|nft| nft.take_back(&entries(mappings)))
}

pub(crate) fn look() -> Result<Option<Table>> {
    NFT.with(Nft::look)
}

pub(crate) fn remove() -> Result<bool> {
    NFT.with(Nft::remove)
}
