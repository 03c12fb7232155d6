//! Fuzz target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wharf_fuzz::map_rows::run(data));
