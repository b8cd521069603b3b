use std::time::Duration;

/// How to join a group. Unset: as the settings or the launcher's variables say ([`crate::Bootstrap`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// Which group: letters, digits, `.`, `_`, `-`; at most 64.
    pub name: String,
    /// This process's rank; unset everywhere: the lowest free one.
    pub rank: Option<u32>,
    /// The most ranks there may be; unset everywhere: as the members say that are there already.
    pub size: Option<u32>,
    /// This process's number among those of its node; unset everywhere: the lowest free one.
    pub local_rank: Option<u32>,
    /// Its node; members of equal `node` share memory. Unset: this machine and network namespace.
    pub node: Option<String>,
    /// The store's address: `tcp://host:port`, `etcd://host:port[,host:port]`.
    pub store: Option<String>,
    /// How long after its last sign of life a member counts as dead. A store may lengthen it (etcd: to 2 s or so).
    pub lease: Duration,
    /// The longest joining may take, and any wait that names no limit of its own; unset: `CROSSRAIL_TIMEOUT`.
    pub timeout: Option<Duration>,
}

impl Default for GroupOptions {
    fn default() -> GroupOptions {
        GroupOptions {
            name: "default".to_owned(),
            rank: None,
            size: None,
            local_rank: None,
            node: None,
            store: None,
            lease: Duration::from_secs(1),
            timeout: None,
        }
    }
}
