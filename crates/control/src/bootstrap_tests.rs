use std::collections::HashMap;

use super::*;

fn detect(vars: &[(&str, &str)], given: Overrides) -> Result<Bootstrap> {
    let vars: HashMap<&str, &str> = vars.iter().copied().collect();
    let mut settings = Settings::default();
    if let Some(store) = vars.get("CROSSRAIL_STORE") {
        settings.set("CROSSRAIL_STORE", store).unwrap();
    }
    Bootstrap::detect(&|name| vars.get(name).map(|value| (*value).to_owned()), &settings, &given)
}

fn from_vars(vars: &[(&str, &str)]) -> Result<Bootstrap> {
    detect(vars, Overrides::default())
}

const TORCHRUN: [(&str, &str); 5] =
    [("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];

#[test]
fn torchrun_is_taken_with_the_port_after_its_own() {
    let found = from_vars(&TORCHRUN).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank), (Some(1), Some(4), Some(1)));
    assert_eq!(found.store, "tcp://10.0.0.1:29501");
    assert!(!found.host_store);
    assert_eq!(
        found.summary,
        "torchrun: RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500, store tcp://10.0.0.1:29501"
    );
    let mut first = TORCHRUN;
    first[0] = ("RANK", "0");
    assert!(from_vars(&first).unwrap().host_store);
}

#[test]
fn torchrun_on_one_machine_needs_nothing_beyond_loopback() {
    let mut vars = TORCHRUN.to_vec();
    vars.push(("LOCAL_WORLD_SIZE", "4"));
    vars.push(("TORCHELASTIC_RUN_ID", "job7"));
    vars.push(("TORCHELASTIC_RESTART_COUNT", "2"));
    let found = from_vars(&vars).unwrap();
    assert_eq!(found.store, "tcp://127.0.0.1:29501");
    assert!(
        found.summary.ends_with(", store tcp://127.0.0.1:29501 (all ranks are on this machine)"),
        "{}",
        found.summary
    );
    assert_eq!(found.job, "job7/2");
    vars[5] = ("LOCAL_WORLD_SIZE", "2");
    assert_eq!(from_vars(&vars).unwrap().store, "tcp://10.0.0.1:29501");
    vars[3] = ("MASTER_ADDR", "fd00::1");
    assert_eq!(from_vars(&vars).unwrap().store, "tcp://[fd00::1]:29501");
}

#[test]
fn what_torchrun_lacks_is_named() {
    for missing in ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        let vars: Vec<_> = TORCHRUN.into_iter().filter(|(name, _)| *name != missing).collect();
        let error = from_vars(&vars).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Config);
        assert!(error.detail.starts_with(&format!("{missing} is not set")), "{error}");
        assert!(error.to_string().contains("torchrun sets it"), "{error}");
    }
    // Optional: the store finds the lowest free one.
    let vars: Vec<_> = TORCHRUN.into_iter().filter(|(name, _)| *name != "LOCAL_RANK").collect();
    assert_eq!(from_vars(&vars).unwrap().local_rank, None);
    let error = from_vars(&[("RANK", "0")]).unwrap_err().to_string();
    assert!(error.contains("WORLD_SIZE is not set, while RANK=0 is"), "{error}");
}

#[test]
fn values_that_are_no_numbers_and_ranks_beyond_the_size_are_errors() {
    for (at, value, text) in [
        (0, "one", "RANK: \"one\" is not a whole number"),
        (0, "4", "rank 4 of 4"),
        (1, "0", "a size of 0"),
        (1, "-2", "WORLD_SIZE: \"-2\""),
        (4, "http", "MASTER_PORT: \"http\" is not a port"),
        (4, "65535", "has no port after it"),
        (4, "0", "is not a port"),
    ] {
        let mut vars = TORCHRUN;
        vars[at].1 = value;
        let error = from_vars(&vars).unwrap_err().to_string();
        assert!(error.contains(text), "{error} lacks {text}");
    }
}

#[test]
fn the_settings_store_comes_before_launchers_and_takes_their_ranks() {
    let store = ("CROSSRAIL_STORE", "etcd://10.0.0.9:2379");
    let mut vars = TORCHRUN.to_vec();
    vars.push(store);
    let found = from_vars(&vars).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank), (Some(1), Some(4), Some(1)));
    assert_eq!(found.store, "etcd://10.0.0.9:2379");
    assert_eq!(
        found.summary,
        "CROSSRAIL_STORE: CROSSRAIL_STORE=etcd://10.0.0.9:2379 RANK=1 WORLD_SIZE=4 LOCAL_RANK=1, \
         store etcd://10.0.0.9:2379"
    );
    let found = from_vars(&[("CROSSRAIL_STORE", "tcp://h:1"), ("RANK", "0"), ("WORLD_SIZE", "2")]).unwrap();
    assert!(found.host_store);
    let found = from_vars(&[("CROSSRAIL_STORE", "tcp://h:1"), ("WORLD_SIZE", "2")]).unwrap();
    assert_eq!((found.rank, found.size, found.host_store), (None, Some(2), false));
    let found = from_vars(&[("CROSSRAIL_STORE", "tcp://h:1")]).unwrap();
    assert_eq!((found.rank, found.size), (None, None));
    assert_eq!(
        found.summary,
        "CROSSRAIL_STORE: CROSSRAIL_STORE=tcp://h:1, rank from the store's rank server, store tcp://h:1"
    );
    let error = from_vars(&[("CROSSRAIL_STORE", "tcp://h:1"), ("RANK", "0")]).unwrap_err().to_string();
    assert!(error.contains("WORLD_SIZE is not set, while CROSSRAIL_STORE=tcp://h:1 RANK=0 is"), "{error}");
}

const SLURM: [(&str, &str); 6] = [
    ("SLURM_PROCID", "5"),
    ("SLURM_NTASKS", "8"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_STEP_NODELIST", "gpu[03-04,9],login"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "2"),
];

#[test]
fn slurm_is_taken_with_a_port_of_the_job() {
    let found = from_vars(&SLURM).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank), (Some(5), Some(8), Some(1)));
    let port = port_of("4711.2");
    assert!(PORTS.contains(&port));
    assert_ne!(port, port_of("4711.3"));
    assert_eq!(found.store, format!("tcp://gpu03:{port}"));
    assert_eq!(found.job, "4711.2");
    assert_eq!(
        found.summary,
        format!(
            "Slurm: SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_STEP_NODELIST=gpu[03-04,9],login \
             SLURM_JOB_ID=4711 SLURM_STEP_ID=2, store tcp://gpu03:{port}"
        )
    );
    let mut one = SLURM.to_vec();
    one.push(("SLURM_NNODES", "1"));
    assert_eq!(from_vars(&one).unwrap().store, format!("tcp://127.0.0.1:{port}"));
    let mut job = SLURM;
    job[3].0 = "SLURM_JOB_NODELIST";
    assert_eq!(from_vars(&job).unwrap().store, format!("tcp://gpu03:{port}"));
    for missing in ["SLURM_NTASKS", "SLURM_JOB_ID"] {
        let vars: Vec<_> = SLURM.into_iter().filter(|(name, _)| *name != missing).collect();
        assert!(from_vars(&vars).unwrap_err().detail.starts_with(&format!("{missing} is not set")));
    }
}

#[test]
fn what_scripts_export_for_torchrun_places_the_store_of_other_launchers() {
    let master = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
    let one_node = [("SLURM_STEP_NUM_NODES", "1"), ("WORLD_SIZE", "3")];
    let found = from_vars(&[&SLURM[..], &master, &one_node].concat()).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank), (Some(5), Some(8), Some(1)));
    assert_eq!(found.store, "tcp://10.0.0.1:29501", "the address that was named, also on one node");
    let found = from_vars(&[&SLURM[..], &master[..1]].concat()).unwrap();
    assert_eq!(found.store, format!("tcp://10.0.0.1:{}", port_of("4711.2")));
    let found = from_vars(&[&OPEN_MPI[..], &master, &SLURM].concat()).unwrap();
    assert_eq!((found.rank, found.size, found.store.as_str()), (Some(0), Some(2), "tcp://10.0.0.1:29501"));
    let mut step = SLURM.to_vec();
    step.push(("SLURM_STEP_NUM_TASKS", "6"));
    assert_eq!(from_vars(&step).unwrap().size, Some(6), "the step's tasks, not the job's");
    // With a store, too, WORLD_SIZE alone does not select torchrun.
    let store = [("CROSSRAIL_STORE", "tcp://h:1"), ("WORLD_SIZE", "8")];
    let found = from_vars(&[&SLURM[..], &store].concat()).unwrap();
    assert_eq!((found.rank, found.size, found.host_store), (Some(5), Some(8), false));
}

#[test]
fn the_first_host_of_every_form_of_list() {
    for (list, host) in [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu-a[01-16]", "gpu-a01"),
        ("gpu[7,9-12],x", "gpu7"),
        ("r[1-2]n[03,05]-ib,z", "r1n03-ib"),
        ("n[1-2].cluster", "n1.cluster"),
    ] {
        assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
    }
    for list in ["", ",a", "n[1-2", "["] {
        assert_eq!(first_host(list), None, "{list}");
    }
}

const OPEN_MPI: [(&str, &str); 5] = [
    ("OMPI_COMM_WORLD_RANK", "0"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "prterun-host-17@1"),
];

#[test]
fn open_mpi_on_one_machine_and_on_several() {
    let found = from_vars(&OPEN_MPI).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank, found.host_store), (Some(0), Some(2), Some(0), true));
    let port = port_of("prterun-host-17@1");
    assert_eq!(found.store, format!("tcp://127.0.0.1:{port}"));
    assert_eq!(
        found.summary,
        format!(
            "Open MPI: OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 \
             PMIX_NAMESPACE=prterun-host-17@1, store tcp://127.0.0.1:{port} (all ranks are on this machine)"
        )
    );
    let mut vars = OPEN_MPI.to_vec();
    vars[3].1 = "1";
    let error = from_vars(&vars).unwrap_err().to_string();
    assert!(error.contains("MASTER_ADDR is not set"), "{error}");
    vars.push(("MASTER_ADDR", "10.0.0.1"));
    assert_eq!(from_vars(&vars).unwrap().store, format!("tcp://10.0.0.1:{port}"));
    let mut older = OPEN_MPI;
    older[4] = ("OMPI_MCA_ess_base_jobid", "77");
    assert_eq!(from_vars(&older).unwrap().store, format!("tcp://127.0.0.1:{}", port_of("77")));
    assert!(from_vars(&OPEN_MPI[..4]).unwrap_err().to_string().contains("PMIX_NAMESPACE is not set"));
}

#[test]
fn arguments_win_over_everything() {
    let given = Overrides { rank: Some(3), size: Some(6), local_rank: Some(0), store: Some("tcp://b:9".to_owned()) };
    let mut vars = TORCHRUN.to_vec();
    vars.push(("CROSSRAIL_STORE", "tcp://a:1"));
    let found = detect(&vars, given).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank), (Some(3), Some(6), Some(0)));
    assert_eq!(found.store, "tcp://b:9");
    assert_eq!(found.summary, "arguments: rank=3 size=6 local_rank=0, store tcp://b:9");
    let found = detect(&TORCHRUN, Overrides { rank: Some(0), size: Some(2), ..Overrides::default() }).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank), (Some(0), Some(2), None));
    assert_eq!(
        found.summary,
        "torchrun: MASTER_ADDR=10.0.0.1 MASTER_PORT=29500, rank=0 size=2, store tcp://10.0.0.1:29501"
    );
    let error = detect(&[], Overrides { store: Some("b:9".to_owned()), ..Overrides::default() }).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Config);
}

#[test]
fn nothing_said_is_an_error_unless_the_group_is_this_process() {
    let error = from_vars(&[("PATH", "/bin"), ("RANK", " ")]).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Config);
    assert!(error.to_string().contains("no launcher variables are set"), "{error}");
    assert!(error.to_string().contains("CROSSRAIL_STORE"), "{error}");
    let error = detect(&[], Overrides { rank: Some(1), size: Some(2), ..Overrides::default() }).unwrap_err();
    assert!(error.to_string().contains("rank=1 size=2, but no store is configured"), "{error}");
    let found = detect(&[], Overrides { size: Some(1), ..Overrides::default() }).unwrap();
    assert_eq!((found.rank, found.size, found.host_store), (Some(0), Some(1), true));
    assert_eq!(found.summary, "alone: size=1, store tcp://127.0.0.1:0 (any free port: nobody else can join)");
}

#[test]
fn the_stores_port_is_one_of_those_that_the_settings_name() {
    let settings = Settings::from_pairs([("CROSSRAIL_PORTS", "18180-18189")]).unwrap();
    let found = |vars: &[(&str, &str)]| {
        let vars = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Bootstrap::detect(&vars, &settings, &Overrides::default()).unwrap().store
    };
    let job =
        |port: &'static str| [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", port)];
    assert_eq!(found(&job("18181")), "tcp://10.0.0.1:18182");
    assert_eq!(found(&job("29500")), "tcp://10.0.0.1:18181");
    let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_NODELIST", "n1,n2"), ("SLURM_JOB_ID", "7")];
    let port: u16 = found(&slurm).rsplit_once(':').unwrap().1.parse().unwrap();
    assert!(settings.ports.unwrap().contains(port), "{port}");
}

#[test]
fn launchers_without_a_host_need_one_beyond_this_machine() {
    let hydra = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
    let error = from_vars(&hydra).unwrap_err().to_string();
    assert!(error.contains("MASTER_PORT is not set") && error.contains("export it for all ranks"), "{error}");
    let found = from_vars(&[&hydra[..], &[("MASTER_PORT", "7000")]].concat()).unwrap();
    assert_eq!((found.rank, found.size, found.local_rank), (Some(1), Some(2), Some(1)));
    assert_eq!(found.store, "tcp://127.0.0.1:7001", "all ranks are here");
    let flux = [("FLUX_TASK_RANK", "0"), ("FLUX_JOB_SIZE", "4"), ("FLUX_JOB_NNODES", "2"), ("FLUX_JOB_ID", "f1")];
    let error = from_vars(&flux).unwrap_err().to_string();
    assert!(error.contains("MASTER_ADDR is not set"), "{error}");
    let found = from_vars(&[&flux[..], &[("MASTER_ADDR", "node1")]].concat()).unwrap();
    assert!(found.store.starts_with("tcp://node1:") && found.host_store, "{found:?}");
}
