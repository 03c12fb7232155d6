//! Answers of the service of delegated mode.

use prost::Message;
use wharf_agent::delegate::answer::{self, AnswerError, Failed, Made};
use wharf_delegate::v1;

/// Maximum bytes of a refusal: 80 escaped characters of a text, and the rule.
const MAX_WORDS: usize = 2_048;

/// Reads an answer: the first byte selects the call, the rest is the message.
pub fn run(bytes: &[u8]) {
    let Some((call, bytes)) = bytes.split_first() else { return };
    let key = v1::AttachmentKey { network: "net".into(), container_id: "c1".into(), interface: "eth0".into() };
    match call % 5 {
        0 => {
            read(v1::AddResponse::decode(bytes), |answer| told(answer::made(answer, &key).map(|made| made.map(check))))
        }
        1 => read(v1::DelResponse::decode(bytes), |answer| told(answer::deleted(answer))),
        2 => read(v1::CheckResponse::decode(bytes), |answer| {
            told(answer::seen(answer, &key).map(|seen| {
                seen.map(|seen| {
                    assert!(seen.findings.len() <= 64 && seen.findings.iter().all(|f| is_text(f, 1_024)), "{seen:?}");
                    check(seen.made);
                })
            }));
        }),
        3 => read(v1::GcResponse::decode(bytes), |answer| told(answer::collected(answer))),
        _ => read(v1::StatusResponse::decode(bytes), |answer| {
            told(answer::ready(answer).map(|name| name.map(|name| assert!(is_text(&name, 253), "{name:?}"))));
        }),
    }
}

fn read<M>(decoded: Result<M, prost::DecodeError>, check: impl FnOnce(M)) {
    // The client refuses other bytes before the agent.
    if let Ok(message) = decoded {
        check(message);
    }
}

fn told<T>(read: Result<Result<T, Failed>, AnswerError>) {
    match read {
        Ok(Ok(_)) => {}
        Ok(Err(failed)) => {
            assert!(failed.code != 0 && !failed.message.is_empty(), "{failed:?}");
            assert!(is_text(&failed.message, 1_024) && is_text(&failed.details, 4_096), "{failed:?}");
            assert!(failed.retry_after_ms.is_none_or(|ms| (1..=60_000).contains(&ms)), "{failed:?}");
        }
        Err(why) => {
            let words = why.to_string();
            assert!((1..=MAX_WORDS).contains(&words.len()), "{words}");
            assert!(!words.chars().any(char::is_control), "{words:?}");
        }
    }
}

fn check(made: Made) {
    assert_eq!(made.attachment.to_string(), "net/c1:eth0");
    assert!(made.netns.is_absolute(), "{made:?}");
    assert!(made.v4.is_none_or(|a| a.net.addr().is_ipv4() && a.gateway.is_none_or(|g| g.is_ipv4())), "{made:?}");
    assert!(made.v6.is_none_or(|a| a.net.addr().is_ipv6() && a.gateway.is_none_or(|g| g.is_ipv6())), "{made:?}");
    assert!(made.routes.len() <= 64 && made.routes.iter().all(|r| r.dst == r.dst.trunc()), "{made:?}");
    assert!(made.dns.nameservers.len() <= 8 && made.dns.search.len() <= 32 && made.dns.options.len() <= 32, "{made:?}");
    assert!((68..=65_535).contains(&made.container.mtu), "{made:?}");
}

fn is_text(text: &str, most: usize) -> bool {
    text.len() <= most && !text.chars().any(char::is_control)
}
