use proptest::prelude::*;

use super::*;

#[path = "../../tests/world/message.rs"]
#[allow(dead_code, unreachable_pub, reason = "the other tests use the rest")]
mod message;

use message::{NXDOMAIN, TXT, address, alias, answer, name, query, record, with_edns};

const A: u16 = message::A;

fn asked(text: &str) -> Question {
    question(&query(7, text, A)).expect("a question")
}

fn found(records: &[Vec<u8>]) -> Result<Vec<(String, u64)>, Unreadable> {
    let message = answer(&query(7, "www.example.com", A), 0, records);
    let found = addresses(&message, &asked("www.example.com"))?;
    Ok(found.into_iter().map(|(address, ttl)| (address.to_string(), ttl.as_secs())).collect())
}

fn list(expected: &[(&str, u64)]) -> Result<Vec<(String, u64)>, Unreadable> {
    Ok(expected.iter().map(|(address, ttl)| ((*address).to_owned(), *ttl)).collect())
}

#[test]
fn a_question_is_read_in_lower_case_and_bytes_that_are_no_letters_are_told_apart() {
    let wanted = Question { name: "www.example.com".into(), rtype: A, class: 1, end: 33 };
    assert_eq!(question(&query(7, "wWw.eXample.com", A)), Ok(wanted.clone()));
    assert_eq!(question(&with_edns(query(7, "www.example.com", A))), Ok(wanted), "EDNS changes nothing");
    assert_eq!(asked("").name, ".");
    let mut odd = query(7, "a.b", TXT);
    odd.splice(12..17, [5, b'a', b'.', b'B', b'\\', 0xc8, 1, b' ', 0]);
    assert_eq!(question(&odd).expect("a question").name, r"a\.b\\\200.\032");
}

#[test]
fn what_is_no_query_is_refused_by_its_reason() {
    let good = query(7, "example.com", A);
    let with = |place: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[place] = byte;
        question(&bytes)
    };
    assert_eq!(question(&good[..11]), Err(Malformed::Short));
    assert_eq!(with(2, 0x80), Err(Malformed::Answer));
    assert_eq!(with(2, 5 << 3), Err(Malformed::Kind(5)));
    assert_eq!(with(5, 0), Err(Malformed::Questions(0)));
    assert_eq!(with(5, 2), Err(Malformed::Questions(2)));
    assert_eq!(with(12, 0xc0), Err(Malformed::Question), "a name that points into the header");
    assert_eq!(with(12, 64), Err(Malformed::Question));
    for length in 12..good.len() {
        assert_eq!(question(&good[..length]), Err(Malformed::Question), "{length} bytes");
    }
    for transfer in TRANSFERS {
        assert_eq!(question(&query(7, "example.com", transfer)), Err(Malformed::Transfer));
    }
    let long = |labels: usize| query(7, &vec!["a".repeat(49); labels].join("."), A);
    assert_eq!(question(&long(5)).expect("251 bytes").name.len(), 249);
    assert_eq!(question(&long(6)), Err(Malformed::Question), "301 bytes");
}

#[test]
fn replies_have_the_id_and_question_of_the_query_and_answers_get_none() {
    let query = with_edns(query(0x1234, "eXample.com", A));
    let question = question(&query).expect("a question");
    let refused = reply(&query, Some(&question), REFUSED).expect("a reply");
    assert_eq!(refused[..12], [0x12, 0x34, 0x81, REFUSED, 0, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(refused[12..], query[12..29]);
    assert!(is_answer(&refused, 0x1234, &question));
    let bare = reply(&query, None, FORMERR).expect("a reply");
    assert_eq!(bare, [0x12, 0x34, 0x81, FORMERR, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(is_answer(&bare, 0x1234, &question), "an error without the question");
    assert_eq!(reply(&refused, Some(&question), REFUSED), None);
    assert_eq!(reply(&query[..11], None, FORMERR), None);
}

#[test]
fn an_answer_has_the_id_and_the_question_of_the_query() {
    let sent = query(7, "example.com", A);
    let is = |message: &[u8]| is_answer(message, 7, &asked("example.com"));
    assert!(is(&answer(&sent, 0, &[])));
    assert!(is(&answer(&query(7, "EXAMPLE.com", A), 0, &[])), "some servers change the case");
    assert!(!is(&sent), "a query");
    assert!(!is(&answer(&query(8, "example.com", A), 0, &[])));
    assert!(!is(&answer(&query(7, "example.org", A), 0, &[])));
    assert!(!is(&answer(&query(7, "example.com", TXT), 0, &[])));
    let mut without_question = reply(&sent, None, 0).expect("a reply");
    assert!(!is(&without_question), "no error");
    without_question[3] = SERVFAIL;
    assert!(is(&without_question));
}

#[test]
fn addresses_are_those_at_the_end_of_the_chain() {
    assert_eq!(found(&[]), list(&[]));
    let plain = [
        address("WWW.example.com", "192.0.2.1", 300),
        address("www.example.com", "2001:db8::1", 60),
        address("other.example.com", "192.0.2.9", 300),
    ];
    assert_eq!(found(&plain), list(&[("192.0.2.1", 300), ("2001:db8::1", 60)]));
    let chain = [
        address("c.example.net", "192.0.2.1", 300),
        alias("b.example.net", "C.example.net", 30),
        address("b.example.net", "192.0.2.9", 300),
        alias("www.example.com", "b.example.net", 60),
        address("www.example.com", "192.0.2.9", 300),
        record(&[0xc0, 12], TXT, 0, b"\x04text"),
        record(&[0xc0, 12], 65280, 0, b"unknown"),
    ];
    assert_eq!(found(&chain), list(&[("192.0.2.1", 30)]), "in any order");
    let circle = [alias("www.example.com", "b.example.net", 60), alias("b.example.net", "www.example.com", 60)];
    assert_eq!(found(&circle), list(&[]));
    let elsewhere = [alias("a.example.net", "b.example.net", 60), address("b.example.net", "192.0.2.9", 300)];
    assert_eq!(found(&elsewhere), list(&[]));
}

#[test]
fn odd_values_are_read_as_the_standards_say() {
    let twice = [address("www.example.com", "192.0.2.1", 300), address("www.example.com", "192.0.2.1", 20)];
    assert_eq!(found(&twice), list(&[("192.0.2.1", 20)]));
    assert_eq!(found(&[address("www.example.com", "192.0.2.1", 1 << 31)]), list(&[("192.0.2.1", 0)]));
    assert_eq!(found(&[address("www.example.com", "::ffff:192.0.2.1", 9)]), list(&[("192.0.2.1", 9)]));
    let mut chaos = address("www.example.com", "192.0.2.1", 300);
    chaos[20] = 3;
    assert_eq!(found(&[chaos]), list(&[]), "another class");
    assert_eq!(found(&[record(&[0xc0, 12], A, 60, &[192, 0, 2, 1])]), list(&[("192.0.2.1", 60)]), "compressed");
}

#[test]
fn answers_that_nobody_can_read_are_errors_but_for_truncated_ones() {
    assert_eq!(found(&[record(&name("www.example.com"), A, 60, &[192, 0, 2])]), Err(Unreadable));
    assert_eq!(found(&[record(&[0xc0, 33], A, 60, &[192, 0, 2, 1])]), Err(Unreadable), "a pointer to itself");
    let long = (0..=MAX_CHAIN).map(|i| alias(&format!("n{i}.example.com"), &format!("n{}.example.com", i + 1), 60));
    assert_eq!(found(&long.collect::<Vec<_>>()), Err(Unreadable));

    let sent = query(7, "www.example.com", A);
    let records = [address("www.example.com", "192.0.2.1", 60), address("www.example.com", "192.0.2.2", 60)];
    let mut cut = answer(&sent, 0, &records);
    cut.truncate(cut.len() - 1);
    assert_eq!(addresses(&cut, &asked("www.example.com")), Err(Unreadable));
    cut[2] |= 2;
    let first = ("192.0.2.1".parse().expect("an address"), Duration::from_secs(60));
    assert_eq!(addresses(&cut, &asked("www.example.com")), Ok(vec![first]));
    let error = answer(&sent, NXDOMAIN, &records);
    assert_eq!(addresses(&error, &asked("www.example.com")), Ok(Vec::new()));
    assert_eq!(addresses(&answer(&sent, 0, &records), &asked("example.org")), Ok(Vec::new()));
}

proptest! {
    #[test]
    fn any_bytes_can_be_looked_at(bytes in prop::collection::vec(any::<u8>(), 0..200), valid_header: bool) {
        let mut bytes = bytes;
        if valid_header && bytes.len() > 12 {
            bytes[2] &= 0x07;
            bytes[4..6].copy_from_slice(&[0, 1]);
        }
        if let Ok(question) = question(&bytes) {
            prop_assert!(question.end <= bytes.len());
            let refused = reply(&bytes, Some(&question), REFUSED).expect("a reply");
            prop_assert_eq!(&refused[12..], &bytes[12..question.end]);
            bytes[2] |= QR;
            prop_assert!(is_answer(&bytes, id(&bytes).expect("an id"), &question));
            drop(addresses(&bytes, &question));
        }
    }

    #[test]
    fn damaged_answers_can_be_looked_at(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)) {
        let sent = query(7, "www.example.com", A);
        let records = [
            alias("www.example.com", "b.example.net", 60),
            record(&[0xc0, 45], A, 60, &[192, 0, 2, 1]),
            address("b.example.net", "2001:db8::1", 60),
        ];
        let mut bytes = answer(&sent, 0, &records);
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        drop(addresses(&bytes, &asked("www.example.com")));
    }
}
