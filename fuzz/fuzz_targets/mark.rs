//! See `wharf_fuzz::mark`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wharf_fuzz::mark::run(data));
