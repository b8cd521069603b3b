//! The process in which an object was created.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::{Error, ErrorKind, Reason, Result};

/// Forks between the process that loaded this code and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Counts a fork. To be called in the child before anything else runs there, as `pthread_atfork` arranges.
pub fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process that made an object.
///
/// A forked child has the object's memory, but none of its threads, and its connections and shared memory are the
/// parent's too: whatever the child did with them would break the parent. Checking costs a load and a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(u32);

impl Origin {
    /// This process.
    pub fn here() -> Origin {
        Origin(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this still is that process, and no fork of it.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Fails in a fork of that process.
    ///
    /// # Errors
    /// `Usage`, with [`Reason::OtherProcess`].
    #[inline]
    pub fn check(self, operation: &str) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(elsewhere(operation)) }
    }
}

#[cold]
fn elsewhere(operation: &str) -> Error {
    Error::new(ErrorKind::Usage, operation, "created before a fork, in the parent process")
        .with_reason(Reason::OtherProcess)
        .with_hint("create a Context in this process and use only objects created from it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_made_before_a_fork_is_refused_and_one_made_after_it_is_not() {
        let before = Origin::here();
        assert_eq!(before.check("send"), Ok(()));
        count_fork();
        let error = before.check("send").unwrap_err();
        assert_eq!((error.kind, error.reason), (ErrorKind::Usage, Some(Reason::OtherProcess)));
        assert!(error.to_string().contains("send: created before a fork"), "{error}");
        assert_eq!(Origin::here().check("send"), Ok(()));
    }
}
