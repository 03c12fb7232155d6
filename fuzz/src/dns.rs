//! A client's query and a server's answer, preceded by the query's length (two bytes).

use wharf_dns::wire;

/// Reads both.
pub fn run(bytes: &[u8]) {
    let Some(([high, low], messages)) = bytes.split_first_chunk() else { return };
    let length = usize::from(u16::from_be_bytes([*high, *low])).min(messages.len());
    let (query, answer) = messages.split_at(length);
    let question = match wire::question(query) {
        Ok(question) => question,
        Err(why) => {
            assert!(!why.to_string().is_empty());
            if let Some(reply) = wire::reply(query, None, wire::FORMERR) {
                assert!(wire::question(&reply).is_err(), "a reply is no query");
            }
            return;
        }
    };
    assert!(question.end <= query.len() && !question.name.is_empty() && question.name.is_ascii());
    assert_eq!(question.name, question.name.to_ascii_lowercase());
    let id = wire::id(query).expect("a query has a header");
    let reply = wire::reply(query, Some(&question), wire::REFUSED).expect("a query is replied to");
    assert!(wire::is_answer(&reply, id, &question) && wire::rcode(&reply) == wire::REFUSED);
    assert_eq!(wire::addresses(&reply, &question), Ok(Vec::new()));
    let mut passed = answer.to_vec();
    wire::set_id(&mut passed, id);
    assert_eq!(passed.len(), answer.len());
    if let Ok(addresses) = wire::addresses(&passed, &question) {
        let mut each: Vec<_> = addresses.iter().map(|(address, _)| *address).collect();
        each.sort_unstable();
        each.dedup();
        assert_eq!(each.len(), addresses.len(), "each address once");
        assert!(addresses.is_empty() || wire::rcode(&passed) == 0);
    }
}
