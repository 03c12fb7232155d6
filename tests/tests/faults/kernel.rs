//! What somebody did to a container's link, programs and routes behind the agent's back.

use anyhow::{Result, ensure};
use wharf_tests::{Node, icmp::ping, process::ip, programs, scenario, wait};

use crate::{
    phrases::{FOREIGN_ROUTE, PROGRAMS_OFF, RENAMED_LINK},
    support::{all_is_well, await_screen, await_status, config, id, remedy, two, wharf},
};

/// Takes the programs off until audit and explain name that: the leak audit mends what it has seen twice, perhaps
/// before they have looked.
fn take_off(node: &Node, id: &str, link: &str) -> Result<()> {
    wait::until("the audit to name what nobody has mended yet", || {
        programs::take_off(node.space(), link, "ingress")?;
        programs::take_off(node.space(), link, "egress")?;
        let (audit, explain) = (wharf(node, &["audit"])?, wharf(node, &["explain", id])?);
        if audit.says("nothing amiss") || explain.says("nothing is wrong") {
            return Ok(None);
        }
        audit.must(1, PROGRAMS_OFF.audit)?;
        audit.must_say(&[link, &format!("(endpoint {id}, epoch")])?;
        explain.must(1, PROGRAMS_OFF.explain)?;
        Ok(Some(()))
    })
}

#[test]
fn programs_taken_off_a_link() -> Result<()> {
    scenario(config(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        let (id, link) = (id(node, &ea)?, node.endpoint(&ea)?.host_ifname);
        take_off(node, &id, &link)?;
        await_status(node, 1, PROGRAMS_OFF.status)?;
        // Each of the two is a remedy by itself.
        for command in PROGRAMS_OFF.remedy {
            take_off(node, &id, &link)?;
            remedy(node, &[*command], &[("ID", &id)])?;
            wharf(node, &["audit"])?.must(0, &["nothing amiss"])?;
            ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        }
        all_is_well(node)?;
        // The timeline keeps the fault.
        wharf(node, &["explain", &id])?.must(0, PROGRAMS_OFF.over)?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn another_route_in_the_place_of_a_containers() -> Result<()> {
    scenario(config(), |node| {
        let [(_a, ea), (_b, eb)] = two(node)?;
        let (id, address) = (id(node, &ea)?, ea.v4()?);
        let other = node.endpoint(&eb)?;
        ip(node.space(), &format!("route replace {address}/32 dev {}", other.host_ifname))?;
        ensure!(ping(node.space(), address.into())?.must_answer().is_err(), "the fault is none");
        await_status(node, 1, FOREIGN_ROUTE.status)?;
        let subject = format!("route {address}/32");
        let audit = wharf(node, &["audit"])?;
        audit.must(1, FOREIGN_ROUTE.audit)?;
        audit.must_say(&[&subject])?;
        let is = format!("goes to interface {}", other.host_ifname);
        // While the audit's own repair runs, the endpoint is being built, and what follows from it is not known yet.
        await_screen(node, &["explain", &address.to_string()], |s| s.is(1, FOREIGN_ROUTE.explain))?.must_say(&[
            &subject,
            &is,
            "web-3f9c51aa",
        ])?;
        remedy(node, FOREIGN_ROUTE.remedy, &[("ADDRESS", &address.to_string()), ("ID", &id)])?;
        all_is_well(node)?;
        ping(node.space(), address.into())?.must_answer()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}

#[test]
fn a_link_with_another_name() -> Result<()> {
    scenario(config(), |node| {
        let [(a, ea), (_b, eb)] = two(node)?;
        let (id, link) = (id(node, &ea)?, node.endpoint(&ea)?.host_ifname);
        ip(node.space(), &format!("link set {link} down"))?;
        ip(node.space(), &format!("link set {link} name uplink0"))?;
        await_status(node, 1, RENAMED_LINK.status)?;
        let audit = wharf(node, &["audit"])?;
        audit.must(1, RENAMED_LINK.audit)?;
        audit.must_say(&[&link, "owner harbour/web-3f9c51aa:eth0"])?;
        ensure!(!audit.says("delete the endpoint"), "another remedy is named beside: {audit:?}");
        await_screen(node, &["explain", "web-3f9c51aa"], |s| s.is(1, RENAMED_LINK.explain))?;
        remedy(node, RENAMED_LINK.remedy, &[("LINK", &link), ("ID", &id)])?;
        all_is_well(node)?;
        ping(a.space()?, eb.v4()?.into())?.must_answer()?;
        node.detach(&ea)?;
        node.detach(&eb)
    })
}
