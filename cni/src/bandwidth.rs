//! Bandwidth limits in bits and bits per second: netconf's keys, as in the reference plugin, and
//! `runtimeConfig.bandwidth`.

use wharf_api::{Bandwidth, BandwidthLimit};

use crate::{fault::Fault, json::Object};

const KEY: &str = "bandwidth";

/// The network's limit wins: more people may annotate pods.
pub(crate) fn parse(netconf: &Object<'_>, runtime: Option<&Object<'_>>) -> Result<Bandwidth, Fault> {
    let network = limits(netconf)?;
    let asked = match runtime.map(|runtime| runtime.object(KEY)).transpose()?.flatten() {
        Some(asked) => limits(&asked.in_any_case())?,
        None => Bandwidth::default(),
    };
    Ok(Bandwidth { ingress: network.ingress.or(asked.ingress), egress: network.egress.or(asked.egress) })
}

fn limits(from: &Object<'_>) -> Result<Bandwidth, Fault> {
    Ok(Bandwidth {
        ingress: limit(from, "ingressRate", "ingressBurst")?,
        egress: limit(from, "egressRate", "egressBurst")?,
    })
}

fn limit(from: &Object<'_>, rate_key: &str, burst_key: &str) -> Result<Option<BandwidthLimit>, Fault> {
    let (rate, burst) = (from.u64(rate_key)?.unwrap_or(0), from.u64(burst_key)?.unwrap_or(0));
    if rate == 0 && burst != 0 {
        let (rate, burst) = (from.path_of(rate_key), from.path_of(burst_key));
        return Err(Fault::config(format!(
            "netconf: key {burst:?} is there without {rate:?}; a burst alone limits nothing: give the rate, or leave the \
             burst out"
        )));
    }
    Ok((rate != 0).then_some(BandwidthLimit { rate, burst }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fault::Code;

    fn read(netconf: &Value, runtime: &Value) -> Result<Bandwidth, Fault> {
        let at = |path: &str, value| Object::at(path.to_owned(), value).unwrap();
        parse(&at("", netconf), Some(&at("runtimeConfig", runtime)))
    }

    fn limit(rate: u64, burst: u64) -> Option<BandwidthLimit> {
        Some(BandwidthLimit { rate, burst })
    }

    #[test]
    fn what_runtimes_send_is_read_and_the_network_goes_first() {
        let asked = json!({"bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 4_294_967_295_u64,
            "egressRate": 1_000_000, "egressBurst": 2_147_483_647}});
        let both = Bandwidth { ingress: limit(8_000_000, 4_294_967_295), egress: limit(1_000_000, 2_147_483_647) };
        assert_eq!(read(&json!({}), &asked), Ok(both));
        let containerd = json!({"bandwidth": {"IngressRate": 8_000_000, "IngressBurst": 4_294_967_295_u64,
            "EgressRate": 1_000_000, "EgressBurst": 2_147_483_647}});
        assert_eq!(read(&json!({}), &containerd), Ok(both));
        let network = json!({"egressRate": 500, "egressBurst": 64_000});
        assert_eq!(read(&network, &asked), Ok(Bandwidth { egress: limit(500, 64_000), ..both }));
        let one = json!({"bandwidth": {"ingressRate": 1, "egressRate": 0, "egressBurst": 0, "extra": []}});
        assert_eq!(read(&json!({}), &one), Ok(Bandwidth { ingress: limit(1, 0), egress: None }));
        for none in [json!({}), json!({"bandwidth": null}), json!({"bandwidth": {}})] {
            assert_eq!(read(&json!({}), &none), Ok(Bandwidth::default()));
        }
    }

    #[test]
    fn a_bad_number_is_a_config_error_that_names_it() {
        for key in ["ingressRate", "ingressBurst", "egressRate", "egressBurst"] {
            for bad in [json!(-1), json!(1.5), json!("1M"), json!(1e30), json!([]), json!(true)] {
                let mut bandwidth = json!({"ingressRate": 1, "egressRate": 1});
                bandwidth[key] = bad.clone();
                let fault = read(&json!({}), &json!({"bandwidth": bandwidth.clone()})).expect_err(key);
                assert_eq!(fault.code, Code::Config, "{key} = {bad}");
                assert!(fault.msg.contains(&format!("runtimeConfig.bandwidth.{key}")), "{}", fault.msg);
                assert!(read(&bandwidth, &json!({})).is_err_and(|f| f.msg.contains(key)), "{key} = {bad}");
            }
        }
        let fault = read(&json!({}), &json!({"bandwidth": {"egressBurst": 8}})).expect_err("no rate");
        assert!(fault.msg.contains("egressBurst") && fault.msg.contains("egressRate"), "{}", fault.msg);
        assert!(read(&json!({}), &json!({"bandwidth": 5})).is_err_and(|f| f.msg.contains("runtimeConfig.bandwidth")));
    }
}
