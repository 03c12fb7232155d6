//! Test packets through an endpoint's pinned programs: `BPF_PROG_TEST_RUN` (net/bpf/test_run.c) does not execute the
//! verdict. The programs report their decision in the packet's control block (`wharf_common::test_packet`), and write
//! no map.

use aya::programs::{SchedClassifier, TestRun as _, TestRunOptions};
use wharf_common::{
    Direction, TestReport,
    test_packet::{MARK_OFFSET, POLICY_MARK, REPORTS_OFFSET},
};
use wharf_core::{
    ids::EndpointId,
    kernel::Result,
    selfcheck::{Case, CaseResult, Hook, Kind, Outcome, Report, Verdict},
};

use super::{Bpf, maps, pins::MAPS};
use crate::error::wrap;

/// Bytes by which a program may lengthen the packet.
const ROOM: usize = 64;
/// Bytes; `struct __sk_buff` has 192 in Linux 6.18. The kernel refuses less.
const CONTEXT_ROOM: usize = 512;
/// Before Linux 5.11 a pending signal ends a run with EINTR.
const RUNS: u32 = 4;

fn run(program: &SchedClassifier, case: &Case) -> CaseResult {
    let mut interrupted = 0;
    loop {
        let mut packet = vec![0; case.packet.len() + ROOM];
        let mut context = [0; CONTEXT_ROOM];
        let mark = if matches!(case.kind, Kind::Policy { .. }) { POLICY_MARK } else { 0 };
        let asked: [[u8; 4]; 1 + MARK_OFFSET / 4] =
            std::array::from_fn(|word| if 4 * word == MARK_OFFSET { mark.to_ne_bytes() } else { [0; 4] });
        let options = TestRunOptions {
            ctx_in: Some(asked.as_flattened()),
            data_in: Some(&case.packet),
            data_out: Some(&mut packet),
            ctx_out: Some(&mut context),
            ..TestRunOptions::new()
        };
        match program.test_run(options) {
            Ok(result) => {
                packet.truncate(usize::try_from(result.data_size_out).unwrap_or(usize::MAX));
                let verdict = Verdict::from_action(result.return_value);
                return Ok(Outcome { verdict, packet, reports: reports(&context) });
            }
            Err(e) => {
                let signal = crate::error::io_cause(&e).is_some_and(|io| io.raw_os_error() == Some(libc::EINTR));
                interrupted += 1;
                if !signal || interrupted == RUNS {
                    return Err(wrap("run program", "test packet", &e).cause);
                }
            }
        }
    }
}

fn reports(context: &[u8]) -> Vec<Report> {
    let report = |direction: Direction| {
        let word = context.get(REPORTS_OFFSET + 4 * direction as usize..)?.first_chunk()?;
        let TestReport { endpoint_id, reason } = TestReport::from_word(u32::from_ne_bytes(*word))?;
        let endpoint = EndpointId::try_from(u16::try_from(endpoint_id).ok()?).ok()?;
        Some(Report { endpoint, direction: direction.as_str(), reason: reason.as_str() })
    };
    [Direction::Egress, Direction::Ingress].into_iter().filter_map(report).collect()
}

impl Bpf {
    pub(crate) fn verdicts(&self, id: EndpointId, cases: &[Case]) -> Result<Vec<CaseResult>> {
        for name in MAPS {
            maps::open(&self.pins.endpoint(id, name), name)?;
        }
        let open = |hook: Hook| {
            let path = self.pins.endpoint(id, hook.program());
            SchedClassifier::from_pin(&path)
                .map_err(|e| wrap("open program", path.display().to_string(), &e).to_string())
        };
        let (from, to) = (open(Hook::FromContainer), open(Hook::ToContainer));
        let result = |case: &Case| {
            let program = match case.hook {
                Hook::FromContainer => &from,
                Hook::ToContainer => &to,
            };
            program.as_ref().map_err(Clone::clone).and_then(|program| run(program, case))
        };
        Ok(cases.iter().map(result).collect())
    }
}

#[cfg(test)]
mod tests {
    use wharf_common::DropReason;

    use super::*;

    #[test]
    fn a_report_is_read_as_it_was_written() {
        assert_eq!(reports(&[0; CONTEXT_ROOM]), [], "no program saw the packet");
        assert_eq!(reports(&[0; 8]), []);
        for direction in Direction::ALL {
            for (endpoint_id, reason) in DropReason::ALL.iter().flat_map(|r| [(1, r), (16_383, r)]) {
                let mut context = [0; CONTEXT_ROOM];
                let at = REPORTS_OFFSET + 4 * direction as usize;
                let word = TestReport::word(endpoint_id, *reason as u32).to_ne_bytes();
                context.get_mut(at..at + 4).expect("room").copy_from_slice(&word);
                let [read] = reports(&context)[..] else { panic!("one report of {reason:?}") };
                assert_eq!(u32::from(read.endpoint.get()), endpoint_id);
                assert_eq!((read.direction, read.reason), (direction.as_str(), reason.as_str()));
            }
        }
    }
}
