//! Stack of the programs, read from the object: kernels count it differently, and only the strictest count says that
//! all of them load it.

use std::{collections::BTreeMap, ops::Range};

use anyhow::{Context, Result, ensure};
use object::{Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionIndex, SymbolKind};

use crate::fixture::object as built;

/// Bytes of stack that a program has, with every function that it is in the middle of (`MAX_BPF_STACK`,
/// `linux/filter.h`).
const STACK_MAX: u64 = 512;
/// Each function's part is rounded up to this before Linux 6.7 (`check_max_stack_depth`, `kernel/bpf/verifier.c`);
/// later kernels round to 16.
const ROUNDED_TO: u64 = 32;
/// Bytes of an instruction, and the frame pointer's register (RFC 9669, sections 2 and 3).
const INSTRUCTION: u64 = 8;
const FRAME: u8 = 10;

/// A function of an object.
struct Function {
    /// Bytes below the frame pointer.
    stack: u64,
    calls: Vec<String>,
}

/// Each by its name.
type Places = BTreeMap<String, (SectionIndex, Range<u64>)>;

fn functions(bytes: &[u8]) -> Result<BTreeMap<String, Function>> {
    let file = object::File::parse(bytes).context("parse the object")?;
    let mut places = Places::new();
    for symbol in file.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0) {
        let section = symbol.section_index().context("a function without a section")?;
        places.insert(symbol.name()?.to_owned(), (section, symbol.address()..symbol.address() + symbol.size()));
    }
    let called = |(section, at): (SectionIndex, u64)| {
        let found = places.iter().find(|(_, (of, place))| *of == section && place.contains(&at));
        found.map(|(name, _)| name.clone()).with_context(|| format!("no function at {at} of section {section}"))
    };
    let mut functions = BTreeMap::new();
    for (name, (index, place)) in &places {
        let section = file.section_by_index(*index)?;
        let code = section.data_range(place.start, place.end - place.start)?.context("code")?;
        let moved: BTreeMap<u64, RelocationTarget> = section.relocations().map(|(at, r)| (at, r.target())).collect();
        let mut function = Function { stack: 0, calls: Vec::new() };
        // Registers that hold the frame pointer: `rX = r10`, which `rX += offset` follows.
        let mut frames = [false; 16];
        for (at, i) in (place.start..).step_by(8).zip(code.chunks_exact(8)) {
            let (opcode, class) = (i[0], i[0] & 7);
            let (to, from) = (i[1] & 15, i[1] >> 4);
            let offset = i64::from(i16::from_le_bytes([i[2], i[3]]));
            let immediate = i64::from(i32::from_le_bytes([i[4], i[5], i[6], i[7]]));
            let below = match class {
                // LDX, ST and STX.
                1 if from == FRAME => offset,
                2 | 3 if to == FRAME => offset,
                7 if opcode == 0x07 && frames[usize::from(to)] => immediate,
                _ => 0,
            };
            function.stack = function.stack.max(below.min(0).unsigned_abs());
            frames[usize::from(to)] = opcode == 0xbf && from == FRAME;
            // CALL of a function of the program (source register 1).
            if opcode == 0x85 && from == 1 {
                let next = at + INSTRUCTION;
                let target = match moved.get(&at) {
                    Some(RelocationTarget::Symbol(symbol)) => {
                        let symbol = file.symbol_by_index(*symbol)?;
                        let inside = if symbol.kind() == SymbolKind::Text { 0 } else { (immediate + 1) * 8 };
                        let section = symbol.section_index().context("a call out of the object")?;
                        (section, symbol.address().wrapping_add_signed(inside))
                    }
                    _ => (*index, next.wrapping_add_signed(immediate * 8)),
                };
                function.calls.push(called(target)?);
            }
        }
        functions.insert(name.clone(), function);
    }
    Ok(functions)
}

/// The deepest chain of calls that begins with this function: its bytes and its functions.
fn deepest(functions: &BTreeMap<String, Function>, name: &str) -> Result<(u64, String)> {
    let function = functions.get(name).with_context(|| name.to_owned())?;
    let own = function.stack.max(1).next_multiple_of(ROUNDED_TO);
    let mut below = (0, String::new());
    for call in &function.calls {
        below = below.max(deepest(functions, call)?);
    }
    Ok((own + below.0, format!("{name} ({}) {}", function.stack, below.1)))
}

#[test]
fn programs_fit_the_stack_of_every_kernel() -> Result<()> {
    let mut most = 0;
    for name in ["endpoint.o", "endpoint-debug.o", "node.o", "sink.o"] {
        let functions = functions(&built(name)?)?;
        ensure!(!functions.is_empty(), "{name} has no functions");
        for function in functions.keys() {
            let (bytes, chain) = deepest(&functions, function)?;
            ensure!(bytes <= STACK_MAX, "{name}: {bytes} bytes of stack, at most {STACK_MAX}: {chain}");
            most = most.max(bytes);
        }
    }
    // `judge` needs more than half. A reader that finds no use of the stack would accept every object.
    ensure!(most > STACK_MAX / 2, "the deepest has {most} bytes");
    Ok(())
}
