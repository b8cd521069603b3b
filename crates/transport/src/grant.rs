use std::sync::atomic::{AtomicU32, Ordering};

const REVOKED: u32 = 1 << 31;

/// Permission to touch one transfer's memory, which its owner can take back at any time.
///
/// A lane holds the grant of what it is moving and calls [`Grant::enter`] around each system call or
/// copy. Once [`Grant::revoke`] has returned, no lane touches the memory again, so the owner may free it.
#[derive(Debug, Default)]
pub struct Grant(AtomicU32);

/// Proof that the memory may be touched until this is dropped.
#[derive(Debug)]
pub struct GrantUse<'a>(&'a Grant);

impl Grant {
    /// Enters the granted memory, or `None` if the grant was revoked. Keep the guard only across one
    /// non-blocking call.
    #[inline]
    pub fn enter(&self) -> Option<GrantUse<'_>> {
        let before = self.0.fetch_add(1, Ordering::Acquire);
        if before & REVOKED != 0 {
            self.0.fetch_sub(1, Ordering::Release);
            return None;
        }
        Some(GrantUse(self))
    }

    /// Takes the permission back and waits for a copy that is in progress this instant.
    pub fn revoke(&self) {
        self.0.fetch_or(REVOKED, Ordering::AcqRel);
        while self.0.load(Ordering::Acquire) != REVOKED {
            std::thread::yield_now();
        }
    }

    /// Whether [`Grant::revoke`] was called.
    pub fn is_revoked(&self) -> bool {
        self.0.load(Ordering::Acquire) & REVOKED != 0
    }
}

impl Drop for GrantUse<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revoked_grant_admits_nobody() {
        let grant = Grant::default();
        assert!(grant.enter().is_some());
        grant.revoke();
        assert!(grant.enter().is_none());
        assert!(grant.is_revoked());
    }
}
