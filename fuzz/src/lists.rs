/// Lists and notices of two peers: what they tell of rows, and their accesses to them.
pub fn lists(input: &[u8]) {
    crossrail::fuzzing::run(input);
}
