/// Notes and descriptors of GPU memory, from a peer on this machine.
pub fn gpu(input: &[u8]) {
    crossrail_cuda_ipc::fuzzing::run(input);
}
