//! Processes of one user, which share a token, and those of others.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

use crossrail_handshake::{Secret, UserToken, connect};
use crossrail_types::{Error, ErrorKind, Reason};

use crate::support::{Descriptors, Worker, config, identity, in_secs};

/// A folder of one test, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("crossrail-users-{}-{count}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    fn token(&self, name: &str) -> UserToken {
        UserToken::in_folder(self.0.join(name))
    }

    fn secret(&self, name: &str) -> Secret {
        let (secret, warnings) = Secret::of_user(self.token(name)).unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        secret
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

fn by_port(worker: &Worker, secret: &Secret) -> Result<(), Error> {
    let session = connect(&worker.by_port(), &identity("connecting", secret.clone()), None, false, in_secs(30.0))?;
    worker.session();
    drop(session);
    Ok(())
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[test]
fn who_shares_the_token_is_admitted_over_tcp_and_nobody_else() {
    let _fds = Descriptors::watch();
    let folder = Folder::new();
    let (ours, theirs) = (folder.secret("ours"), folder.secret("theirs"));
    let worker = Worker::start(config(), identity("listening", ours.clone())).unwrap();
    by_port(&worker, &ours).unwrap();
    for (stranger, text) in [(theirs, "accepts processes of user"), (Secret::None, "accepts processes of its own user")]
    {
        let error = by_port(&worker, &stranger).unwrap_err();
        let there = worker.rejected();
        assert_eq!(error.reason, Some(Reason::UserDenied), "{error}");
        assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("CROSSRAIL_SECRET_FILE")), "{error}");
        for error in [error, there] {
            assert_eq!(error.kind, ErrorKind::Refused, "{error}");
            assert!(error.detail.contains(text), "{error}");
        }
    }
    // Over the Unix socket the kernel says who the user is: containers need not share the folder.
    let me = identity("connecting", folder.secret("container"));
    let session = connect(&worker.by_address(), &me, None, true, in_secs(30.0)).unwrap();
    assert!(session.stream.is_unix());
    worker.session();
}

#[test]
fn a_listener_that_asks_for_no_token_is_refused() {
    let _fds = Descriptors::watch();
    let folder = Folder::new();
    let worker = Worker::start(config(), identity("listening", Secret::None)).unwrap();
    let error = by_port(&worker, &folder.secret("ours")).unwrap_err();
    assert_eq!((error.kind, error.reason), (ErrorKind::Refused, Some(Reason::UserDenied)), "{error}");
    assert!(error.detail.contains("does not ask for its user's token"), "{error}");
}

#[test]
fn a_token_that_is_cleaned_away_is_made_again_for_both_ends() {
    let _fds = Descriptors::watch();
    let folder = Folder::new();
    let (listening, connecting) = (folder.secret("ours"), folder.secret("ours"));
    let worker = Worker::start(config(), identity("listening", listening)).unwrap();
    let path = folder.token("ours").path();
    let first = std::fs::read(&path).unwrap();
    std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    by_port(&worker, &connecting).unwrap();
    assert_ne!(std::fs::read(&path).unwrap(), first);
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    assert_eq!(std::fs::metadata(path.parent().unwrap()).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn processes_that_start_at_once_make_one_token() {
    let _fds = Descriptors::watch();
    let folder = Folder::new();
    for round in 0..50 {
        let name = round.to_string();
        let start = Barrier::new(8);
        let make = || {
            start.wait();
            folder.secret(&name);
            std::fs::read(folder.token(&name).path()).unwrap()
        };
        let tokens: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(tokens.iter().all(|token| token.len() == 32 && *token == tokens[0]), "{tokens:?}");
        assert_eq!(std::fs::read_dir(folder.0.join(&name)).unwrap().count(), 1, "drafts are removed");
    }
}

#[test]
fn a_token_that_others_may_have_made_is_an_error() {
    let _fds = Descriptors::watch();
    let folder = Folder::new();
    let token = folder.token("ours");
    let refused = |text: &str| {
        let error = Secret::of_user(token.clone()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Config, "{error}");
        assert!(error.detail.contains(text), "{error}");
        assert!(error.hint.as_deref().is_some_and(|hint| hint.contains("CROSSRAIL_SECRET_FILE")), "{error}");
    };
    folder.secret("elsewhere");
    let (own, path) = (folder.0.join("ours"), token.path());
    symlink(folder.0.join("elsewhere"), &own).unwrap();
    refused("ours is no folder");
    std::fs::remove_file(&own).unwrap();
    std::fs::write(&own, "").unwrap();
    refused("ours is no folder");
    std::fs::remove_file(&own).unwrap();
    folder.secret("ours");
    set_mode(&own, 0o755);
    refused("has mode 755");
    set_mode(&own, 0o700);
    set_mode(&path, 0o640);
    refused("has mode 640");
    set_mode(&path, 0o600);
    std::fs::write(&path, "short").unwrap();
    refused("has 5 bytes instead of 32");
    std::fs::remove_file(&path).unwrap();
    symlink(folder.token("elsewhere").path(), &path).unwrap();
    refused("token open: ");
    if nix::unistd::Uid::effective().is_root() {
        std::os::unix::fs::chown(&own, Some(65534), None).unwrap();
        refused("belongs to user 65534, not to user 0");
    }
}

#[test]
fn where_no_file_can_be_made_a_warning_says_so() {
    let _fds = Descriptors::watch();
    let (secret, warnings) = Secret::of_user(UserToken::in_folder("/proc/self/no such folder/x")).unwrap();
    assert_eq!(secret, Secret::None);
    assert!(matches!(&warnings[..], [one] if one.contains("every user of this machine")), "{warnings:?}");
}
