//! Row 0 of `PROFILES`: the interface for packets to the proxy.

use aya::maps::{Array, MapData};
use wharf_common::{EndpointProfile, map};
use wharf_core::kernel::Result;

use super::Bpf;
use crate::error::wrap;

impl Bpf {
    fn profiles(&self) -> Result<Array<MapData, EndpointProfile>> {
        self.open_held(map::PROFILES)
    }

    /// Zeros: no redirects.
    pub(crate) fn ensure_way_to_proxy(&self, row: EndpointProfile) -> Result<()> {
        let failed = |e: aya::maps::MapError| wrap("set up redirects", "row 0 of PROFILES", &e);
        let mut profiles = self.profiles()?;
        if profiles.get(&0, 0).map_err(failed)? == row {
            return Ok(());
        }
        profiles.set(0, row, 0).map_err(failed)
    }

    pub(crate) fn way_to_proxy(&self) -> Result<Option<u32>> {
        let row = self.profiles()?.get(&0, 0).map_err(|e| wrap("look at redirects", "row 0 of PROFILES", &e))?;
        Ok(Some(row.config.ifindex).filter(|ifindex| *ifindex != 0))
    }
}
