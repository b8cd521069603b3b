use crossrail_handshake::Address;
use crossrail_handshake::wire;
use sha2::{Digest, Sha256};

/// A message of the handshake, as any of them; and the hello's body. What is read and written again must be read as
/// the same.
pub fn handshake(input: &[u8]) {
    if wire::decode_prelude(input).is_ok() {
        assert!(input.len() >= wire::PRELUDE_LEN);
    }
    if let Ok(challenge) = wire::decode_challenge(input) {
        assert!(challenge.version_min <= challenge.version_max);
        assert_eq!(wire::decode_challenge(&challenge.encode()), Ok(challenge));
    }
    if let Ok(reply) = wire::decode_reply(input) {
        assert_eq!(wire::decode_reply(&reply.encode()), Ok(reply));
    }
    if let Ok(lane) = wire::decode_lane_hello(input) {
        assert_eq!(wire::decode_lane_hello(&lane.encode()), Ok(lane));
    }
    if let Ok(mac) = wire::decode_proof(input) {
        assert_eq!(wire::decode_proof(&wire::encode_proof(&mac)), Ok(mac));
    }
    if let Ok(head) = wire::decode_hello_head(input) {
        assert!(head.length as usize <= wire::HELLO_MAX);
        assert_eq!(wire::decode_hello_head(&head.encode()), Ok(head));
    }
    if let Ok(reject) = wire::decode_reject(input) {
        assert!(!reject.text.chars().any(char::is_control));
        assert!(wire::decode_reject(&reject.encode()).is_ok_and(|again| again.code == reject.code));
    }
    if let Ok(hello) = wire::decode_hello(input) {
        assert!(hello.chunk > 0 && hello.window > 0 && hello.channels > 0);
        let again = hello.encode().unwrap_or_else(|error| panic!("a hello that was read cannot be sent: {error}"));
        assert!(wire::decode_hello(&again).is_ok_and(|again| again == hello));
        assert_eq!(hello.disagreement(&hello), None);
    }
}

/// A worker's address: the bytes as they are, and as the fields behind a right magic number, version and checksum.
pub fn address(input: &[u8]) {
    read_address(input);
    let mut sealed = crate::seeds::ADDRESS_START.to_vec();
    sealed.extend_from_slice(input);
    let sum = Sha256::digest(&sealed);
    sealed.extend_from_slice(&sum[..8]);
    read_address(&sealed);
}

fn read_address(bytes: &[u8]) {
    match Address::decode(bytes) {
        Ok(address) => {
            assert!(Address::decode(&address.encode()).is_ok_and(|again| again == address));
            assert!(![&address.name, &address.boot_id].iter().any(|text| text.chars().any(char::is_control)));
        }
        Err(error) => assert!(!error.detail.is_empty() && error.to_string().len() < 1024, "{error}"),
    }
}
