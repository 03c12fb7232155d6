//! `wharf ipam list`.

use wharf_api::{IpFamily, IpamView, RestingAddress};

use super::{
    Style, Tone,
    screen::Screen,
    table::{cell, lines, number, table, token},
    text,
};

pub(crate) fn list(view: &IpamView, style: &Style) -> String {
    let pools = view
        .pools
        .iter()
        .map(|p| {
            let family = match p.family {
                IpFamily::Ipv4 => "IPv4",
                IpFamily::Ipv6 => "IPv6",
            };
            let tone = if p.used >= p.total { Tone::Bad } else { Tone::Plain };
            vec![
                token(&p.name),
                token(family),
                token(text::fill(p.used, p.total)).tone(tone),
                number(p.resting),
                lines(&p.cidrs, 8),
            ]
        })
        .collect();
    let mut sorted: Vec<_> = view.leases.iter().collect();
    sorted.sort_by(|a, b| (a.ip, &a.pool).cmp(&(b.ip, &b.pool)));
    let leases = sorted
        .into_iter()
        .map(|l| {
            vec![
                token(l.ip.to_string()),
                token(&l.pool),
                token(text::age(style.now_unix_ms, l.since_unix_ms)),
                cell(&l.owner),
            ]
        })
        .collect();
    let mut screen = Screen::new(style);
    screen.block(&table(style, &["POOL", "FAMILY", "LEASED", "RESTING", "CIDRS"], pools));
    screen.gap();
    screen.block(&table(style, &["ADDRESS", "POOL", "AGE", "OWNER"], leases));
    if !view.resting.is_empty() {
        let row = |r: &RestingAddress| {
            vec![
                token(r.ip.to_string()),
                token(&r.pool),
                token(text::age(style.now_unix_ms, r.since_unix_ms)),
                cell(&r.last_owner),
                cell(r.blocked.as_deref().unwrap_or("")).tone(Tone::Warn),
            ]
        };
        screen.gap();
        let rows = view.resting.iter().map(row).collect();
        screen.block(&table(style, &["RESTING", "POOL", "FOR", "LAST OWNER", "HELD BACK BY"], rows));
    }
    screen.finish()
}

#[cfg(test)]
mod tests {
    use wharf_api::{IpamLease, PoolView};

    use super::*;
    use crate::render::sample::{HOSTILE, NOW};

    #[test]
    fn leases_by_address_and_a_full_pool() {
        let lease = |last: u8, owner: &str| IpamLease {
            ip: [10, 88, 0, last].into(),
            pool: "default".to_owned(),
            owner: owner.to_owned(),
            since_unix_ms: NOW - 12_000,
        };
        let view = IpamView {
            pools: vec![PoolView {
                name: "default".to_owned(),
                family: IpFamily::Ipv4,
                cidrs: vec!["10.88.0.0/30".to_owned(), "10.89.0.0/31".to_owned()],
                used: 3,
                resting: 1,
                total: 3,
                masquerade: None,
            }],
            resting: vec![RestingAddress {
                ip: [10, 88, 0, 3].into(),
                pool: "default".to_owned(),
                last_owner: "wharf/77d0aa01b2:eth0".to_owned(),
                since_unix_ms: NOW - 40_000,
                blocked: Some("route 10.88.0.3/32".to_owned()),
            }],
            leases: vec![lease(10, HOSTILE), lease(2, "wharf/3f9c51aa01b2:eth0"), lease(1, "node")],
        };
        insta::assert_snapshot!(list(&view, &Style::plain()), @r"
        POOL     FAMILY  LEASED        RESTING  CIDRS
        default  IPv4    3/3 (100.0%)        1  10.88.0.0/30
                                                10.89.0.0/31

        ADDRESS     POOL     AGE  OWNER
        10.88.0.1   default  12s  node
        10.88.0.2   default  12s  wharf/3f9c51aa01b2:eth0
        10.88.0.10  default  12s  k8s:app=\u{1b}[2J\u{9b}31m\u{202e}evil\r\nfake row

        RESTING    POOL     FOR  LAST OWNER             HELD BACK BY
        10.88.0.3  default  40s  wharf/77d0aa01b2:eth0  route 10.88.0.3/32
        ");
    }

    #[test]
    fn nothing_leased() {
        insta::assert_snapshot!(list(&IpamView::default(), &Style::plain()), @r"
        POOL  FAMILY  LEASED  RESTING  CIDRS

        ADDRESS  POOL  AGE  OWNER
        ");
    }
}
