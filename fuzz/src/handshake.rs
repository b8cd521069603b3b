use crossrail_handshake::Address;
use crossrail_handshake::wire::{
    Challenge, Confirm, HELLO_MAX, HelloHead, LaneHello, PRELUDE_LEN, Proof, Protocol, Reject, Reply, STORE, WORKER,
    decode_hello,
};
use sha2::{Digest, Sha256};

/// A message of either protocol's handshake, as any of them; and the hello's body. What is read and written again must
/// be read as the same.
pub fn handshake(input: &[u8]) {
    messages(&WORKER, input);
    messages(&STORE, input);
    if let Ok(lane) = LaneHello::decode(input) {
        assert_eq!(lane.encode(), input);
    }
    if let Ok(head) = HelloHead::decode(input) {
        assert!(head.length as usize <= HELLO_MAX);
        assert_eq!(head.encode(), input);
    }
    if let Ok(hello) = decode_hello(input) {
        assert!(hello.chunk > 0 && hello.window > 0 && hello.channels > 0);
        let again = hello.encode().unwrap_or_else(|error| panic!("a hello that was read cannot be sent: {error}"));
        assert!(decode_hello(&again).is_ok_and(|again| again == hello));
        assert_eq!(hello.disagreement(&hello), None);
    }
}

/// The messages that both protocols have: reserved bytes are zero, so those read are the only ones that mean it.
pub(crate) fn messages(protocol: &Protocol, input: &[u8]) {
    if protocol.decode_prelude(input).is_ok() {
        assert!(input.len() >= PRELUDE_LEN);
    }
    if let Ok(challenge) = Challenge::decode(protocol, input) {
        assert_eq!(challenge.encode(protocol), input);
    }
    if let Ok(reply) = Reply::decode(protocol, input) {
        assert_eq!(reply.encode(protocol), input);
    }
    if let Ok(proof) = Proof::decode(protocol, input) {
        assert_eq!(proof.encode(protocol), input);
    }
    if let Ok(confirm) = Confirm::decode(protocol, input) {
        assert_eq!(confirm.encode(protocol), input);
    }
    if let Ok(reject) = Reject::decode(protocol, input) {
        assert!(!reject.text.chars().any(char::is_control));
        assert!(Reject::decode(protocol, &reject.encode(protocol)).is_ok_and(|again| again.code == reject.code));
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
