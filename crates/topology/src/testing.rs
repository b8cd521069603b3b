//! A fake sysfs and procfs in a temporary folder.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::tree::Tree;

/// A fake machine; its folder is removed on drop.
pub(crate) struct Fake(PathBuf);

impl Fake {
    pub(crate) fn new() -> Fake {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("crossrail-topology-{}-{number}", std::process::id()));
        for folder in ["sys", "proc"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        Fake(root)
    }

    pub(crate) fn tree(&self) -> Tree {
        Tree { sys: self.0.join("sys"), proc: self.0.join("proc") }
    }

    pub(crate) fn file(&self, path: &str, text: &str) {
        self.put(self.0.join("sys").join(path), text);
    }

    pub(crate) fn proc_file(&self, path: &str, text: &str) {
        self.put(self.0.join("proc").join(path), text);
    }

    /// Creates a symbolic link; both paths are relative to sysfs.
    pub(crate) fn link(&self, path: &str, target: &str) {
        let path = self.0.join("sys").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(self.0.join("sys").join(target), path).unwrap();
    }

    fn put(&self, path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
