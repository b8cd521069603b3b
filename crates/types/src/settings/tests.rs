use super::*;

fn from(pairs: &[(&str, &str)]) -> Result<Settings> {
    Settings::from_pairs(pairs.iter().copied())
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn an_empty_environment_yields_the_defaults() {
    let settings = from(&[("PATH", "/bin"), ("crossrail_tls", "nonsense")]).unwrap();
    assert_eq!(settings.tls, Filter::All);
    assert_eq!(settings.net_devices, Rails::Named(Filter::All));
    assert_eq!((settings.bounce, settings.unpack), (128 << 20, Unpack::Kernel));
    assert_eq!(settings.control_device, None);
    assert_eq!(settings.chunk, 2 << 20);
    assert_eq!(settings.window, 16);
    assert_eq!(settings.channels, Channels::Auto);
    assert_eq!((settings.io_threads, settings.affinity), (IoThreads::Auto, Affinity::Auto));
    assert_eq!(settings.timeout, Duration::from_secs(30));
    assert!(settings.secret.is_none() && settings.secret_file.is_none());
    assert_eq!(settings.log, LogLevel::Warn);
    settings.check().unwrap();
}

#[test]
fn every_setting_is_parsed() {
    let settings = from(&[
        ("CROSSRAIL_TLS", "shm,tcp"),
        ("CROSSRAIL_NET_DEVICES", "^eth0, eth5"),
        ("CROSSRAIL_CONTROL_DEVICE", "eth0"),
        ("CROSSRAIL_CHUNK", "512K"),
        ("CROSSRAIL_WINDOW", "32"),
        ("CROSSRAIL_CHANNELS", "4"),
        ("CROSSRAIL_BOUNCE", "64M"),
        ("CROSSRAIL_UNPACK", "d2d"),
        ("CROSSRAIL_IO_THREADS", "2"),
        ("CROSSRAIL_AFFINITY", "off"),
        ("CROSSRAIL_TIMEOUT", "1.5"),
        ("CROSSRAIL_SECRET", "hunter2"),
        ("CROSSRAIL_STORE", "etcd://10.0.0.1:2379,[fd00::2]:2379"),
        ("CROSSRAIL_NODE", " rack-7.b_2 "),
        ("CROSSRAIL_CACHE_DIR", "/var/cache/kernels"),
        ("CROSSRAIL_LOG", "debug"),
    ])
    .unwrap();
    assert_eq!(settings.tls, Filter::Only(names(&["shm", "tcp"])));
    assert_eq!(settings.net_devices, Rails::Named(Filter::Except(names(&["eth0", "eth5"]))));
    assert_eq!((settings.bounce, settings.unpack), (64 << 20, Unpack::D2d));
    assert_eq!(settings.control_device.as_deref(), Some("eth0"));
    assert_eq!((settings.chunk, settings.window, settings.channels), (512 << 10, 32, Channels::Count(4)));
    assert_eq!((settings.io_threads, settings.affinity), (IoThreads::Count(2), Affinity::Off));
    assert_eq!(settings.timeout, Duration::from_millis(1500));
    assert_eq!(settings.secret.as_ref().map(Secret::expose), Some(&b"hunter2"[..]));
    assert_eq!(settings.store.as_deref(), Some("etcd://10.0.0.1:2379,[fd00::2]:2379"));
    assert_eq!(settings.node.as_deref(), Some("rack-7.b_2"));
    assert_eq!(settings.cache_dir, Some(PathBuf::from("/var/cache/kernels")));
    assert_eq!(settings.log, LogLevel::Debug);
    settings.check().unwrap();
    let settings = from(&[("CROSSRAIL_SECRET_FILE", "/etc/secret")]).unwrap();
    assert_eq!(settings.secret_file, Some(PathBuf::from("/etc/secret")));
}

#[test]
fn an_invalid_value_is_reported_with_setting_and_accepted_values() {
    for (name, value, form) in [
        ("CROSSRAIL_TLS", "rdma", "known: self, shm, cuda_ipc, fabric, ucx, tcp"),
        ("CROSSRAIL_TLS", "^shm,rdma", "known: self, shm, cuda_ipc, fabric, ucx, tcp"),
        ("CROSSRAIL_TLS", "", "`all`"),
        ("CROSSRAIL_TLS", "shm,^tcp", "`^tcp`"),
        ("CROSSRAIL_TLS", "shm,shm", "twice"),
        ("CROSSRAIL_TLS", "all,shm", "`all`"),
        ("CROSSRAIL_TLS", "^all", "`all`"),
        ("CROSSRAIL_TLS", "SHM", "known: self, shm, cuda_ipc, fabric, ucx, tcp"),
        ("CROSSRAIL_NET_DEVICES", "eth1,,eth2", "eth1,eth2"),
        ("CROSSRAIL_NET_DEVICES", "127.0.0.2,127.0.0.2", "lists 127.0.0.2 twice"),
        ("CROSSRAIL_NET_DEVICES", "^", "^eth0"),
        ("CROSSRAIL_NET_DEVICES", "near:", "near:1"),
        ("CROSSRAIL_NET_DEVICES", "near:a100", "near:1"),
        ("CROSSRAIL_BOUNCE", "1K", "1M to 256G"),
        ("CROSSRAIL_BOUNCE", "lots", "1M to 256G"),
        ("CROSSRAIL_UNPACK", "cpu", "`host`"),
        ("CROSSRAIL_CONTROL_DEVICE", "eth0,eth1", "one interface"),
        ("CROSSRAIL_CONTROL_DEVICE", " ", "one interface"),
        ("CROSSRAIL_CHUNK", "2MB", "4K to 1G"),
        ("CROSSRAIL_CHUNK", "4095", "4K to 1G"),
        ("CROSSRAIL_CHUNK", "2G", "4K to 1G"),
        ("CROSSRAIL_CHUNK", "many \" quotes \" x", "4K to 1G"),
        ("CROSSRAIL_WINDOW", "0", "1 to 1024"),
        ("CROSSRAIL_WINDOW", "1025", "1 to 1024"),
        ("CROSSRAIL_WINDOW", "-1", "1 to 1024"),
        ("CROSSRAIL_WINDOW", "16.0", "1 to 1024"),
        ("CROSSRAIL_CHANNELS", "65", "1 to 64"),
        ("CROSSRAIL_CHANNELS", "many", "`auto`"),
        ("CROSSRAIL_IO_THREADS", "0", "`auto`"),
        ("CROSSRAIL_IO_THREADS", "Auto", "`auto`"),
        ("CROSSRAIL_TIMEOUT", "0", "1ms to 24h"),
        ("CROSSRAIL_TIMEOUT", "25h", "1ms to 24h"),
        ("CROSSRAIL_TIMEOUT", "soon", "500ms"),
        ("CROSSRAIL_SECRET_FILE", "", "a path"),
        ("CROSSRAIL_STORE", "10.0.0.1:7400", "tcp://host:port"),
        ("CROSSRAIL_STORE", "redis://10.0.0.1:7400", "known: tcp, etcd"),
        ("CROSSRAIL_STORE", "tcp://10.0.0.1", "not host:port"),
        ("CROSSRAIL_STORE", "tcp://:7400", "not host:port"),
        ("CROSSRAIL_STORE", "tcp://a:0", "not host:port"),
        ("CROSSRAIL_STORE", "tcp://a:1,b:1", "only etcd"),
        ("CROSSRAIL_STORE", "etcd://a:1,", "not host:port"),
        ("CROSSRAIL_LOG", "verbose", "`info`"),
    ] {
        let error = from(&[(name, value)]).unwrap_err();
        let text = error.to_string();
        assert_eq!(error.kind, ErrorKind::Config);
        assert!(text.starts_with(&format!("{name}: {value:?} ")), "{text}");
        assert!(text.contains(form), "{text} lacks {form}");
    }
}

#[test]
fn an_unknown_setting_is_an_error_with_the_nearest_name() {
    for (wrong, right) in [
        ("CROSSRAIL_TSL", "CROSSRAIL_TLS"),
        ("CROSSRAIL_NET_DEVICE", "CROSSRAIL_NET_DEVICES"),
        ("CROSSRAIL_CHUNK_SIZE", "CROSSRAIL_CHUNK"),
        ("CROSSRAIL_LOGLEVEL", "CROSSRAIL_LOG"),
    ] {
        let error = from(&[(wrong, "1")]).unwrap_err();
        assert_eq!((error.kind, error.operation.as_str()), (ErrorKind::Config, wrong));
        assert!(error.to_string().contains(&format!("did you mean {right}?")), "{error}");
    }
    for far in ["CROSSRAIL_FOO", "CROSSRAIL_COLOUR", "CROSSRAIL_X", "CROSSRAIL_NUM_PROCESSES"] {
        let text = from(&[(far, "1")]).unwrap_err().to_string();
        assert!(!text.contains("did you mean") && text.contains("`crossrail info` lists all settings"), "{text}");
    }
    // Field names are accepted in code only.
    assert!(from(&[("CROSSRAIL_", "1")]).is_err());
    assert!(from(&[("CROSSRAIL_chunk", "1")]).is_err());
}

#[test]
fn secret_and_secret_file_are_mutually_exclusive() {
    let both = [("CROSSRAIL_SECRET", "a"), ("CROSSRAIL_SECRET_FILE", "/b")];
    assert!(from(&both).unwrap_err().to_string().contains("CROSSRAIL_SECRET_FILE"));
}

#[test]
fn a_secret_is_never_shown() {
    let settings = from(&[("CROSSRAIL_SECRET", "hunter2")]).unwrap();
    assert!(!format!("{settings:?} {:?}", settings.shown()).contains("hunter2"));
    let error = from(&[("CROSSRAIL_SECRET", "")]).unwrap_err();
    assert!(error.to_string().starts_with("CROSSRAIL_SECRET: value is empty"), "{error}");
}

#[cfg(unix)]
#[test]
fn a_value_that_is_not_utf8_is_an_error() {
    use std::os::unix::ffi::OsStringExt;
    let value = OsString::from_vec(vec![0xff, 0xfe]);
    let error = Settings::from_os([(OsString::from("CROSSRAIL_LOG"), value)]).unwrap_err();
    assert!(error.to_string().contains("UTF-8"), "{error}");
    let secret = OsString::from_vec(b"hunter2\xff".to_vec());
    let error = Settings::from_os([(OsString::from("CROSSRAIL_SECRET"), secret)]).unwrap_err();
    assert!(error.to_string().contains("UTF-8") && !format!("{error:?} {error}").contains("hunter"), "{error}");
}

#[test]
fn values_set_in_code_are_checked_too() {
    let base = Settings::default;
    assert!(Settings { chunk: 1, ..base() }.check().unwrap_err().to_string().contains("4K to 1G"));
    assert!(Settings { window: 0, ..base() }.check().is_err());
    assert!(Settings { timeout: Duration::ZERO, ..base() }.check().is_err());
    assert!(Settings { timeout: Duration::from_nanos(1_500_000_001), ..base() }.check().is_ok());
    assert!(Settings { tls: Filter::Only(names(&["rdma"])), ..base() }.check().is_err());
    assert!(Settings { tls: Filter::Only(Vec::new()), ..base() }.check().is_err());
    assert!(Settings { channels: Channels::Count(0), ..base() }.check().is_err());
    assert!(Settings { io_threads: IoThreads::Count(0), ..base() }.check().is_err());
}

#[test]
fn set_accepts_variable_and_field_names_and_changes_nothing_else() {
    let mut settings = Settings::default();
    settings.set("chunk", "4M").unwrap();
    settings.set("CROSSRAIL_WINDOW", "8").unwrap();
    assert_eq!((settings.chunk, settings.window), (4 << 20, 8));
    assert!(settings.set("chunk", "x").is_err());
    assert_eq!(settings.chunk, 4 << 20);
    let error = settings.set("chunks", "4M").unwrap_err().to_string();
    assert!(error.contains("did you mean chunk?") && !error.contains("CROSSRAIL_"), "{error}");
}

#[test]
fn filters_include_or_exclude_names() {
    let only = Filter::Only(names(&["shm"]));
    let except = Filter::Except(names(&["shm"]));
    assert!(Filter::All.allows("shm"));
    assert!(only.allows("shm") && !only.allows("tcp"));
    assert!(!except.allows("shm") && except.allows("tcp"));
}

#[test]
fn rails_may_be_those_near_a_gpu() {
    for (text, rails) in [
        ("near", Rails::Near(None)),
        ("near:3", Rails::Near(Some(3))),
        ("near:cuda:1", Rails::Near(Some(1))),
        ("nearby", Rails::Named(Filter::Only(names(&["nearby"])))),
    ] {
        assert_eq!(from(&[("CROSSRAIL_NET_DEVICES", text)]).unwrap().net_devices, rails, "{text}");
    }
    assert_eq!(Rails::Near(Some(3)).to_string(), "near:3");
}

#[test]
fn displayed_values_parse_back() {
    let pairs = [
        ("CROSSRAIL_TLS", "^tcp"),
        ("CROSSRAIL_NET_DEVICES", "127.0.0.1,127.0.0.2"),
        ("CROSSRAIL_CHUNK", "64K"),
        ("CROSSRAIL_CHANNELS", "auto"),
        ("CROSSRAIL_IO_THREADS", "3"),
        ("CROSSRAIL_TIMEOUT", "250ms"),
        ("CROSSRAIL_STORE", "tcp://node1:7400"),
        ("CROSSRAIL_LOG", "off"),
    ];
    let shown = from(&pairs).unwrap().shown();
    for (name, value) in pairs {
        assert!(shown.contains(&(name, Some(value.to_owned()))), "{name}");
    }
    let again: Vec<_> = shown.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let settings = Settings::from_pairs(again.iter().map(|(name, value)| (*name, value.as_str()))).unwrap();
    assert_eq!(settings.timeout, Duration::from_millis(250));
}

#[test]
fn the_reference_covers_every_setting() {
    let reference = Settings::reference();
    assert_eq!(reference.len(), Settings::NAMES.len());
    for (info, name) in reference.iter().zip(Settings::NAMES) {
        assert_eq!(info.name, *name);
        assert_eq!(info.field.to_uppercase(), name[PREFIX.len()..]);
        assert!(info.doc.ends_with('.') && !info.accepts.is_empty(), "{info:?}");
    }
    let chunk = reference.iter().find(|info| info.field == "chunk").unwrap();
    assert_eq!(chunk.default.as_deref(), Some("2M"));
}

#[test]
fn levels_are_ordered() {
    assert!(LogLevel::Off < LogLevel::Error && LogLevel::Warn < LogLevel::Info && LogLevel::Info < LogLevel::Debug);
}

#[test]
fn transports_of_ucx_follow_its_name() {
    let tls = |text: &str| from(&[("CROSSRAIL_TLS", text)]).map(|settings| settings.tls);
    for (text, theirs) in
        [("ucx:rc,ud", vec!["rc", "ud"]), ("shm,ucx:tcp", vec!["tcp"]), (" ucx: rc_mlx5 ", vec!["rc_mlx5"])]
    {
        let filter = tls(text).unwrap();
        assert!(filter.allows("ucx") && !filter.allows("tcp"), "{text}");
        assert_eq!(filter.of_ucx(), Some(names(&theirs)), "{text}");
        assert_eq!(tls(&filter.to_string()).unwrap(), filter);
    }
    assert!(tls("shm,ucx:tcp").unwrap().allows("shm"));
    assert_eq!(tls("ucx,tcp").unwrap().of_ucx(), None);
    for (text, why) in [
        ("ucx:", "no names"),
        ("ucx:rc,", "no names"),
        ("ucx:rc;ud", "no names"),
        ("ucx,ucx:rc", "lists ucx twice"),
        ("^shm,ucx:rc", "combines"),
        ("all,ucx:rc", "combines"),
        ("shmucx:rc", "unknown transport"),
    ] {
        let error = tls(text).unwrap_err();
        assert!(error.to_string().contains(why), "{text}: {error}");
    }
}

#[test]
fn a_provider_of_libfabric_follows_its_name() {
    let tls = |text: &str| from(&[("CROSSRAIL_TLS", text)]).map(|settings| settings.tls);
    for (text, provider) in [("fabric:efa", "efa"), ("shm, fabric:tcp;ofi_rxm ,tcp", "tcp;ofi_rxm")] {
        let filter = tls(text).unwrap();
        assert!(filter.allows("fabric") && !filter.allows("ucx"), "{text}");
        assert_eq!(filter.of_fabric(), Some(provider), "{text}");
        assert_eq!(tls(&filter.to_string()).unwrap(), filter);
    }
    assert_eq!(tls("fabric,tcp").unwrap().of_fabric(), None);
    assert_eq!(tls("^fabric").unwrap().of_fabric(), None);
    assert!(!tls("^fabric").unwrap().allows("fabric"));
    for text in ["fabric:", "fabrics", "xfabric:tcp"] {
        assert!(tls(text).unwrap_err().to_string().contains("unknown transport"), "{text}");
    }
}

#[test]
fn ports_are_one_or_a_range_and_not_for_loopback() {
    let set = |text: &str| {
        let mut settings = Settings::default();
        settings.set("CROSSRAIL_PORTS", text).map(|()| settings)
    };
    let settings = set("18180 - 18199").unwrap();
    assert_eq!(settings.ports.unwrap().to_string(), "18180-18199");
    assert_eq!(settings.ports_at("10.0.0.1".parse().unwrap()), settings.ports);
    assert_eq!(settings.ports_at("127.0.0.2".parse().unwrap()), None);
    assert_eq!(settings.ports_at("::ffff:127.0.0.1".parse().unwrap()), None);
    assert_eq!(set("18180").unwrap().ports.unwrap().to_string(), "18180");
    for bad in ["", "0", "5-4", "0-9", "65536", "a-b", "1-2-3", "18180,18181"] {
        let error = set(bad).unwrap_err();
        assert!(error.kind == ErrorKind::Config && error.to_string().contains("CROSSRAIL_PORTS"), "{bad}: {error}");
    }
}
