//! Fuzz target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wharf_fuzz::pools_file::run(data));
