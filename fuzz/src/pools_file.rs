//! The file of `--pools-from-cluster` (`<state-dir>/pools.json`).

use wharf_agent::cluster::pools::rewrite;
use wharf_core::{
    ids::PoolName,
    ipam::{Ipam, PoolConfig},
};

/// Reads the file, and its CIDRs as pools.
pub fn run(bytes: &[u8]) {
    match rewrite(bytes, "a") {
        Ok(read) => {
            let again = rewrite(read.0.as_bytes(), "a").expect("what was written");
            assert_eq!(again, read);
            let name = PoolName::parse("default").expect("the name of a pool");
            let pools = vec![PoolConfig { name: name.clone(), cidrs: read.1 }];
            if let Err(why) = Ipam::new(pools, name) {
                assert!(!why.to_string().is_empty());
            }
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
}
