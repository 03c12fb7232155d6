#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;

fn labels(texts: &[&str]) -> BTreeSet<Label> {
    texts.iter().map(|t| t.parse().unwrap()).collect()
}

#[test]
fn the_same_labels_share_a_number_until_the_last_reference_goes() {
    let mut ids = IdentityAllocator::new();
    let web = labels(&["k8s:app=web", "k8s:io.kubernetes.pod.namespace=prod"]);
    let first = ids.acquire(&web).unwrap();
    assert_eq!(first, Identity::FIRST_LOCAL);
    assert_eq!(ids.acquire(&web).unwrap(), first);
    assert_ne!(ids.acquire(&labels(&["k8s:app=db"])).unwrap(), first);
    assert!(!ids.release(first));
    assert_eq!(ids.get(first), Some(&web));
    assert!(ids.release(first));
    assert_eq!(ids.get(first), None);
    assert!(!ids.release(first), "nobody refers to it any more");
}

#[test]
fn what_names_one_pod_makes_no_identity() {
    let mut ids = IdentityAllocator::new();
    let pod = |n: u32| {
        let mut set = labels(&["k8s:app=web", "container:name=x", "container:id=abc", "k8s:pod-template-hash=77"]);
        set.insert(format!("k8s:io.kubernetes.pod.name=web-{n}").parse().unwrap());
        set
    };
    let first = ids.acquire(&pod(1)).unwrap();
    assert_eq!(ids.acquire(&pod(2)).unwrap(), first);
    assert_eq!(ids.get(first), Some(&labels(&["k8s:app=web"])));
    assert_eq!(ids.list()[0].references, 2);
    // The source is part of a label.
    assert_ne!(ids.acquire(&labels(&["container:app=web"])).unwrap(), first);
}

#[test]
fn reserved_labels_have_fixed_numbers_and_stand_alone() {
    let mut ids = IdentityAllocator::new();
    for (text, identity) in [
        ("reserved:host", Identity::HOST),
        ("reserved:world", Identity::WORLD),
        ("reserved:unmanaged", Identity::UNMANAGED),
        ("reserved:health", Identity::HEALTH),
        ("reserved:init", Identity::INIT),
        ("reserved:remote-node", Identity::REMOTE_NODE),
    ] {
        assert_eq!(ids.acquire(&labels(&[text, "container:id=y"])).unwrap(), identity);
        ids.claim(identity, &labels(&[text])).unwrap();
        assert!(!ids.release(identity));
    }
    assert_eq!(ids.list(), []);
    assert_eq!(
        ids.acquire(&labels(&["reserved:host", "k8s:app=web"])).unwrap_err().to_string(),
        "resolve identity of label reserved:host=: a reserved label stands alone; remove it or the others"
    );
    for unknown in ["reserved:root", "reserved:host=1"] {
        assert!(matches!(ids.acquire(&labels(&[unknown])), Err(IdentityError::Reserved { .. })));
    }
}

#[test]
fn a_restored_identity_keeps_its_number() {
    let mut ids = IdentityAllocator::new();
    let web = labels(&["k8s:app=web"]);
    ids.claim(Identity(300), &web).unwrap();
    assert_eq!(ids.acquire(&web).unwrap(), Identity(300));
    assert_eq!(ids.list()[0].references, 2);
    assert_eq!(ids.acquire(&labels(&["k8s:app=db"])).unwrap(), Identity(301), "numbers before it may linger in maps");
}

#[test]
fn labels_whose_number_stands_for_others_by_now_get_another() {
    let mut ids = IdentityAllocator::new();
    let (web, db) = (labels(&["k8s:app=web"]), labels(&["k8s:app=db"]));
    let number = ids.acquire(&web).unwrap();
    assert!(ids.release(number));
    ids.claim(number, &db).unwrap();
    assert_ne!(ids.acquire(&web).unwrap(), number);
    assert_eq!(ids.get(number), Some(&db));
}

#[test]
fn a_claim_that_contradicts_changes_nothing() {
    let mut ids = IdentityAllocator::new();
    let web = labels(&["k8s:app=web"]);
    ids.claim(Identity(300), &web).unwrap();
    let before = ids.list();
    for (identity, of, why) in [
        (300, labels(&["k8s:app=db"]), "claim identity 300: it stands for other labels"),
        (301, web.clone(), "claim identity 301: its labels have the identity 300"),
        (7, labels(&["k8s:app=db"]), "claim identity 7: it is not one of 256 to 65535"),
        (65_536, labels(&["k8s:app=db"]), "claim identity 65536: it is not one of 256 to 65535"),
        (300, labels(&["reserved:host"]), "claim identity 300: its labels are those of the reserved identity 1"),
    ] {
        let error = ids.claim(Identity(identity), &of).unwrap_err().to_string();
        assert_eq!(error, format!("{why}; the endpoint's labels are resolved anew"));
    }
    assert_eq!(ids.list(), before);
}

#[test]
fn all_numbers_are_used_before_it_says_so_and_a_free_one_is_found_again() {
    let mut ids = IdentityAllocator::new();
    let nth = |n: u32| labels(&[&format!("k8s:app=n{n}")]);
    let total = LAST_LOCAL.0 - Identity::FIRST_LOCAL.0 + 1;
    for n in 0..total {
        assert_eq!(ids.acquire(&nth(n)).unwrap(), Identity(256 + n));
    }
    assert_eq!(ids.acquire(&nth(total)), Err(IdentityError::Exhausted { total: 65_280 }));
    assert!(ids.release(Identity(400)));
    assert_eq!(ids.acquire(&nth(total)).unwrap(), Identity(400));
}

proptest! {
    #[test]
    fn references_are_those_of_a_naive_list(ops in prop::collection::vec((0u8..6, any::<bool>(), any::<usize>()), 1..200)) {
        let mut ids = IdentityAllocator::new();
        let mut held: Vec<(u8, Identity)> = Vec::new();
        for (app, acquire, at) in ops {
            if acquire || held.is_empty() {
                let identity = ids.acquire(&labels(&[&format!("k8s:app=a{app}")])).unwrap();
                for (other, number) in &held {
                    prop_assert_eq!(*other == app, *number == identity);
                }
                held.push((app, identity));
            } else {
                let (_, identity) = held.swap_remove(at % held.len());
                let last = held.iter().all(|(_, number)| *number != identity);
                prop_assert_eq!(ids.release(identity), last);
            }
            let references: u64 = ids.list().iter().map(|r| r.references).sum();
            prop_assert_eq!(references, held.len() as u64);
        }
    }
}

#[test]
fn names_of_pod_and_namespace_do_not_say_what_an_endpoint_is() {
    let of_a_runtime = labels(&["k8s:io.kubernetes.pod.name=web-1", "k8s:io.kubernetes.pod.namespace=shop"]);
    assert!(!says_what(&of_a_runtime));
    assert!(!says_what(&BTreeSet::new()));
    for label in ["k8s:app=web", "cni:app=web", "container:io.kubernetes.pod.namespace=x"] {
        let mut more = of_a_runtime.clone();
        more.extend(labels(&[label]));
        assert!(says_what(&more), "{label}");
    }
}
