//! Forwarding between containers and other networks. A node that forwards IPv6 ignores router advertisements, and loses
//! its default route, unless `accept_ra` is 2 (Documentation/networking/ip-sysctl.rst): interfaces with `accept_ra` 1
//! get 2.

use std::{fs, io, path::Path};

use wharf_core::{finding::NodeProblem, kernel::Result};

pub(crate) use crate::settings::{dotted, set};
use crate::{
    error::wrap,
    settings::{Before, FORWARD4, FORWARD6, ROOT, Settings, read},
};

const OPERATION: &str = "set up forwarding";
/// The kernel sets it opposite to [`FORWARD4`].
const REDIRECTS: &str = "ipv4/conf/all/accept_redirects";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Families {
    pub(crate) ipv4: bool,
    pub(crate) ipv6: bool,
}

pub(crate) struct Forwarding(Settings);

impl Forwarding {
    pub(crate) fn new(run_dir: &Path) -> Self {
        Self(Settings::new(run_dir, ""))
    }

    pub(crate) fn ensure(&self, families: Families) -> Result<()> {
        self.0.change(wanted(families, &self.changed()?)?, per_interface)
    }

    pub(crate) fn changed(&self) -> Result<Before> {
        self.0.changed()
    }

    pub(crate) fn take_back(&self) -> Result<()> {
        self.0.take_back()
    }

    pub(crate) fn observe(&self, families: Families, repairable: bool) -> Result<Vec<NodeProblem>> {
        let wanted = wanted(families, &self.changed()?)?;
        let problem = |(path, expected): (String, &str)| {
            Ok(NodeProblem::Setting {
                found: read(&path)?,
                name: dotted(&path),
                expected: expected.to_owned(),
                repairable,
            })
        };
        wanted.into_iter().map(problem).collect()
    }
}

fn wanted(families: Families, changed: &Before) -> Result<Vec<(String, &'static str)>> {
    let mut wanted = Vec::new();
    if families.ipv4 && read(FORWARD4)? != "1" {
        wanted.push((FORWARD4.to_owned(), "1"));
    }
    let forwards = !families.ipv6 || read(FORWARD6)? == "1";
    // Otherwise another program decides `accept_ra`.
    if families.ipv6 && (!forwards || changed.contains_key(FORWARD6)) {
        for name in interfaces("ipv6")? {
            let path = format!("ipv6/conf/{name}/accept_ra");
            if read(&path).is_ok_and(|value| value == "1") {
                wanted.push((path, "2"));
            }
        }
    }
    if !forwards {
        wanted.push((FORWARD6.to_owned(), "1"));
    }
    Ok(wanted)
}

fn interfaces(family: &str) -> Result<Vec<String>> {
    let path = format!("{ROOT}/{family}/conf");
    let failed = |e: io::Error| wrap(OPERATION, path.as_str(), &e);
    let mut names = Vec::new();
    for entry in fs::read_dir(&path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        let own = wharf_core::endpoint::parse_host_ifname(&name).is_some()
            || name.starts_with(crate::ROUTER_IFNAME)
            || name == crate::OVERLAY_IFNAME;
        if !own && name != "all" && name != "lo" {
            names.push(name);
        }
    }
    Ok(names)
}

/// Values that the kernel overwrites with a node-wide setting.
fn per_interface(path: &str) -> Result<Vec<(String, String)>> {
    let family = match path {
        FORWARD4 => "ipv4",
        FORWARD6 => "ipv6",
        _ => return Ok(Vec::new()),
    };
    let redirects = if family == "ipv4" { Some((REDIRECTS.to_owned(), read(REDIRECTS)?)) } else { None };
    let paths = interfaces(family)?.into_iter().map(|name| format!("{family}/conf/{name}/forwarding"));
    let forwarding = paths.filter(|path| read(path).is_ok_and(|value| value == "1")).map(|path| (path, "1".to_owned()));
    Ok(forwarding.chain(redirects).collect())
}
