#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| crossrail_fuzz::fabric(input));
