//! See `wharf_fuzz::rest_body`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wharf_fuzz::rest_body::run(data));
