//! Runs two closures at the same time.

use std::thread::{Builder, scope};

/// Runs `other` on a thread of its own while `here` runs on this one, or after it where the system has no thread left.
/// The first result is `None` when `other` panicked.
pub fn run_concurrently<A: Send, B>(other: impl Fn() -> A + Sync, here: impl FnOnce() -> B) -> (Option<A>, B) {
    on(Builder::new(), &other, here)
}

fn on<A: Send, B>(builder: Builder, other: &(impl Fn() -> A + Sync), here: impl FnOnce() -> B) -> (Option<A>, B) {
    scope(|scope| {
        let started = builder.spawn_scoped(scope, other);
        let made = here();
        let found = match started {
            Ok(thread) => thread.join().ok(),
            Err(_) => Some(other()),
        };
        (found, made)
    })
}

#[cfg(test)]
mod tests {
    use std::thread::current;

    use super::*;

    #[test]
    fn both_run_at_once_and_a_panic_is_reported() {
        let here = current().id();
        let (there, made) = run_concurrently(|| current().id(), || current().id());
        assert_eq!(made, here);
        assert_ne!(there, Some(here));
        assert_eq!(run_concurrently(|| panic!("on purpose"), || 2), (None::<()>, 2));
    }

    #[test]
    fn without_a_thread_both_run_here() {
        let none = Builder::new().stack_size(1 << 60);
        let here = current().id();
        assert_eq!(on(none, &|| current().id(), || 2), (Some(here), 2));
    }
}
