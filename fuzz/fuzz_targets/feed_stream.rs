//! See `wharf_fuzz::feed_stream`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wharf_fuzz::feed_stream::run(data));
