//! Routes from netconf's `routes` or an IPAM plugin's result.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;
use wharf_api::ContainerRoute;

use crate::{fault::Fault, json::Object, rules::cut};

/// The agent's limit.
const MAX_ROUTES: usize = 64;

/// `{dst, gw?}`; `None` if absent. Ignores other keys of CNI 1.1.0.
pub(crate) fn parse(root: &Object<'_>, key: &str) -> Result<Option<Vec<ContainerRoute>>, Fault> {
    if root.value(key).is_none() {
        return Ok(None);
    }
    let items = root.list(key)?;
    if items.len() > MAX_ROUTES {
        let path = root.path_of(key);
        return Err(Fault::config(format!("netconf: key {path:?} has {} routes, at most {MAX_ROUTES}", items.len())));
    }
    let mut seen = BTreeSet::new();
    let mut routes = Vec::with_capacity(items.len());
    for (path, item) in items {
        let item = Object::at(path, item)?;
        let bad = |key: &str, why: String| Fault::config(format!("netconf: key {:?}: {why}", item.path_of(key)));
        let text = item.required_string("dst")?;
        let dst: IpNet = text.parse().map_err(|_| bad("dst", format!("{:?} is not ADDRESS/PREFIX", cut(text))))?;
        if dst.trunc() != dst {
            return Err(bad("dst", format!("{dst} has host bits set; write {}", dst.trunc())));
        }
        if !seen.insert(dst) {
            return Err(bad("dst", format!("{dst} is there twice")));
        }
        let gw = item.string("gw")?.filter(|text| !text.is_empty());
        let gw = gw.map(|text| text.parse::<IpAddr>().map_err(|_| bad("gw", format!("{:?} is no address", cut(text)))));
        let gw = gw.transpose()?;
        if gw.is_some_and(|gw| gw.is_ipv4() != dst.addr().is_ipv4()) {
            return Err(bad("gw", format!("a gateway of the other family than {dst}")));
        }
        routes.push(ContainerRoute { dst, gw });
    }
    Ok(Some(routes))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(routes: Value) -> Result<Option<Vec<ContainerRoute>>, Fault> {
        let document = json!({ "routes": routes });
        parse(&Object::root(document.as_object().unwrap()), "routes")
    }

    #[test]
    fn absent_is_not_empty() {
        assert_eq!(read(Value::Null), Ok(None));
        assert_eq!(read(json!([])), Ok(Some(Vec::new())));
        let routes =
            read(json!([{"dst": "10.2.0.0/16"}, {"dst": "::/0", "gw": "fd00::1", "mtu": 1}])).unwrap().unwrap();
        assert_eq!(routes[0], ContainerRoute { dst: "10.2.0.0/16".parse().unwrap(), gw: None });
        assert_eq!(routes[1].gw, "fd00::1".parse().ok());
    }

    #[test]
    fn what_is_no_route_is_refused_by_name() {
        let many: Vec<Value> = (0..65).map(|n| json!({"dst": format!("10.{n}.0.0/16")})).collect();
        for (routes, words) in [
            (json!({}), "\"routes\" must be a list"),
            (json!([1]), "routes[0]"),
            (json!([{}]), "routes[0].dst"),
            (json!([{"dst": "10.2.0.0"}]), "ADDRESS/PREFIX"),
            (json!([{"dst": "10.2.0.1/16"}]), "write 10.2.0.0/16"),
            (json!([{"dst": "10.2.0.0/33"}]), "ADDRESS/PREFIX"),
            (json!([{"dst": "10.2.0.0/16"}, {"dst": "10.2.0.0/16"}]), "routes[1].dst\": 10.2.0.0/16 is there twice"),
            (json!([{"dst": "10.2.0.0/16", "gw": "x"}]), "routes[0].gw"),
            (json!([{"dst": "10.2.0.0/16", "gw": "fd00::1"}]), "other family"),
            (Value::from(many), "65 routes, at most 64"),
        ] {
            let fault = read(routes.clone()).expect_err(&routes.to_string());
            assert!(fault.msg.contains(words), "{routes}: {}", fault.msg);
        }
    }
}
