use std::sync::Arc;
use std::time::{Duration, Instant};

use crossrail_control::{Store, StoreServer, open};
use crossrail_types::Settings;

/// What waits for no deadline has happened after this, on a machine that does many other things.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn soon() -> Instant {
    Instant::now() + 2 * PATIENCE
}

/// A server at a free port, and its settings.
pub(crate) struct Fixture {
    pub(crate) server: StoreServer,
    pub(crate) settings: Settings,
}

impl Fixture {
    pub(crate) fn start() -> Fixture {
        let settings = Settings::default();
        Fixture { server: StoreServer::start("127.0.0.1:0", &settings).unwrap(), settings }
    }

    pub(crate) fn with_secret(secret: &str) -> Fixture {
        let mut settings = Settings::default();
        settings.set("secret", secret).unwrap();
        Fixture { server: StoreServer::start("tcp://127.0.0.1:0", &settings).unwrap(), settings }
    }

    pub(crate) fn client(&self) -> Arc<dyn Store> {
        open(&self.server.address(), &self.settings, soon()).unwrap()
    }
}
