/// Bytes taken from the front; zeros once they have run out.
pub(crate) struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Input<'a> {
        Input(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn left(&self) -> usize {
        self.0.len()
    }

    /// What has not been taken.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut array = [0; N];
        self.fill(&mut array);
        array
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.fill(&mut bytes);
        bytes
    }

    fn fill(&mut self, into: &mut [u8]) {
        let len = into.len().min(self.0.len());
        let (taken, rest) = self.0.split_at(len);
        into[..len].copy_from_slice(taken);
        self.0 = rest;
    }
}
