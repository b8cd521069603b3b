use std::time::Duration;

/// How to join a group. Unset fields are taken from the settings or the launcher's variables; see
/// [`crate::Bootstrap`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupOptions {
    /// The group's name: at most 64 letters, digits, `.`, `_` and `-`.
    pub name: String,
    /// This process's rank; by default the lowest free one.
    pub rank: Option<u32>,
    /// The maximum number of ranks; by default that of the current members.
    pub size: Option<u32>,
    /// This process's index on its node; by default the lowest free one.
    pub local_rank: Option<u32>,
    /// The node's name; members with equal names share memory. By default this machine and network namespace, and the
    /// name in `CROSSRAIL_NODE`.
    pub node: Option<String>,
    /// The store's address: `tcp://host:port`, `etcd://host:port[,host:port]`.
    pub store: Option<String>,
    /// How long after its last renewal a member counts as dead. A store may lengthen it (etcd to about 2 s).
    pub lease: Duration,
    /// Timeout of joining, and the default of every wait; by default `CROSSRAIL_TIMEOUT`.
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
