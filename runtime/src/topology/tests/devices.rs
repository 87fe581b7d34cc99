//! GPUs: how they are named, and what may stand beside each other.

use super::{MODEL, Overrides, Place, Topology, lines};
use crate::topology::{CudaCard, DeviceSpec, Isolation};

const UUID: &str = "GPU-5d4c7b1e-00aa-4f7e-9c3b-0123456789ab";

fn listed(devices: &[&str]) -> String {
    format!("{MODEL}[[node]]\ndevices = {devices:?}\n")
}

#[test]
fn gpus_are_named_by_number_or_by_uuid() {
    let place = Place::new();
    let upper = format!("cuda:GPU-{}", UUID[4..].to_uppercase());
    let topology = place.load(&listed(&["cuda:3", &upper, "cuda:0"])).unwrap();
    assert_eq!(topology.tensor_parallel_size(), 3);
    assert_eq!(topology.devices()[0], DeviceSpec::Cuda(CudaCard::Index(3)));
    let DeviceSpec::Cuda(CudaCard::Uuid(uuid)) = topology.devices()[1] else { panic!("{topology:?}") };
    assert_eq!(uuid.bytes()[..6], [0x5d, 0x4c, 0x7b, 0x1e, 0x00, 0xaa]);
    assert_eq!(uuid.bytes()[15], 0xab);
    assert_eq!(uuid.to_string(), UUID);
    assert_eq!(topology.devices()[1].to_string(), format!("cuda:{UUID}"));
}

#[test]
fn names_that_are_no_gpu_say_what_was_probably_meant() {
    let place = Place::new();
    let bare = format!("did you mean \"cuda:{UUID}\"?");
    let short = &format!("cuda:{}", &UUID[..20]);
    let long = &format!("cuda:{UUID}0");
    let cases = [
        ("cuda", "name the card, as in \"cuda:0\""),
        ("gpu", "name the card, as in \"cuda:0\""),
        ("gpu:2", "did you mean \"cuda:2\"?"),
        ("CUDA:2", "did you mean \"cuda:2\"?"),
        ("cuda2", "did you mean \"cuda:2\"?"),
        ("cuda:99999", "write \"cuda:N\" with the card's number"),
        ("cuda:GPU-", "is not the UUID of a GPU; write all of it, as `nvidia-smi -L` shows it"),
        ("cuda:GPU-5d4c7b1e-00aa-4f7e-9c3b-+123456789ab", "is not the UUID of a GPU"),
        (short, "is not the UUID of a GPU"),
        (long, "is not the UUID of a GPU"),
        (UUID, &bare),
        ("cpo", "did you mean \"cpu\"?"),
        ("tpu", "use \"cpu\", \"cpu:N\", \"cuda:N\" or \"cuda:GPU-UUID\""),
        ("", "use \"cpu\""),
        ("é", "use \"cpu\""),
    ];
    for (name, told) in cases {
        let found = place.refused(&listed(&[name]));
        assert!(found.len() == 1 && found[0].contains(told), "{name}: {found:?}");
    }
}

#[test]
fn gpus_and_cpus_do_not_stand_in_one_replica() {
    let place = Place::new();
    for (devices, column) in
        [(["cuda:0", "cuda:1", "cpu", "cpu"], 32), (["cpu", "cuda:0", "cpu", "cuda:1"], 19)]
    {
        let found = place.refused(&listed(&devices));
        let start = format!("three.toml:4:{column}: node[0].devices: ");
        assert!(found.len() == 1 && found[0].starts_with(&start), "{found:?}");
        assert!(
            found[0].contains("ranks of one replica") && found[0].contains("list GPUs only"),
            "{found:?}"
        );
    }
    // Whatever table they stand in.
    let two = format!("{}[[node]]\ndevices = [\"cpu\"]\n", listed(&["cuda:0"]));
    assert!(
        place.refused(&two)[0].starts_with("three.toml:6:12: node[1].devices: \"cpu\" beside \"cuda:0\"")
    );
}

#[test]
fn no_card_holds_two_ranks() {
    let place = Place::new();
    let same =
        [("cuda:1", "cuda:1"), ("cuda:1", "cuda:01"), (&format!("cuda:{UUID}"), &format!("cuda:{UUID} "))];
    for (first, second) in same {
        let error = place.load(&listed(&[first, "cuda:0", second])).unwrap_err();
        let found = lines(&error, &place);
        assert!(
            found.len() == 1 && found[0].contains("is listed twice, and two ranks cannot share"),
            "{found:?}"
        );
        let other = error.violations()[0].other_place().unwrap();
        assert!(other.ends_with("three.toml:4:12"), "the first time is at {other}");
    }
    // Shares of a CPU are no cards.
    assert_eq!(place.load(&listed(&["cpu:1", "cpu:1"])).unwrap().tensor_parallel_size(), 2);
}

#[test]
fn more_ranks_than_gpus_are_refused_whoever_asks_for_them() {
    let place = Place::new();
    let told =
        "3 ranks, but [[node]] lists 2 devices; set it to 2, or list 3 devices, or leave one of the two out";
    let in_file = format!("{}[parallel]\ntensor_parallel_size = 3\n", listed(&["cuda:0", "cuda:1"]));
    assert!(place.refused(&in_file)[0].ends_with(told));

    let ranks = |ranks| Overrides { tensor_parallel_size: Some(ranks), ..Overrides::default() };
    for other in [1, 3] {
        // Of a list of CPUs the number of ranks decides; GPUs are never traded for CPUs.
        let error = place.layered(&listed(&["cuda:0", "cuda:1"]), &[], &ranks(other)).unwrap_err();
        let found = lines(&error, &place);
        assert!(found.len() == 1 && found[0].contains("[[node]] lists 2 devices"), "{found:?}");
        assert!(found[0].starts_with("--tensor-parallel-size"), "{found:?}");
    }
    let both = Overrides { devices: Some("cuda:1,cuda:0,cuda:2".to_owned()), ..ranks(3) };
    let topology = place.layered(&listed(&["cuda:0", "cuda:1"]), &[], &both).unwrap();
    assert_eq!(topology.devices()[0], DeviceSpec::Cuda(CudaCard::Index(1)));
}

#[test]
fn replicas_take_the_devices_in_their_order() {
    let place = Place::new();
    let parallel = |keys: &str| format!("[parallel]\n{keys}\n");
    let shown = |topology: &Topology| {
        let of =
            |devices: &[DeviceSpec]| devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let replicas = topology.replica_devices().map(of).collect::<Vec<_>>().join(" | ");
        (topology.tensor_parallel_size(), topology.data_parallel_size(), replicas)
    };
    let load = |text: &str| shown(&place.load(text).unwrap());
    let gpus = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"];
    let two = "data_parallel_size = 2";
    let expected = (2, 2, "cuda:0 cuda:1 | cuda:2 cuda:3".to_owned());
    assert_eq!(load(&format!("{}{}", listed(&gpus), parallel(two))), expected, "ranks are counted");
    let all = format!("tensor_parallel_size = 2\n{two}\nweights = [2, 1]");
    assert_eq!(load(&format!("{}{}", listed(&gpus), parallel(&all))), expected);
    assert_eq!(load(&format!("{MODEL}{}", parallel(two))), (1, 2, "cpu | cpu".to_owned()));
    let three = "tensor_parallel_size = 3\ndata_parallel_size = 2";
    assert_eq!(load(&format!("{MODEL}{}", parallel(three))), (3, 2, "cpu cpu cpu | cpu cpu cpu".to_owned()));

    // A flag wins over a file: a list of CPUs gives way, a list of GPUs must do.
    let flag = Overrides { data_parallel_size: Some(2), ..Overrides::default() };
    let layered = |text: &str| place.layered(text, &[], &flag);
    let cpus = format!("{}{}", listed(&["cpu:0", "cpu:1"]), parallel("tensor_parallel_size = 2"));
    assert_eq!(shown(&layered(&cpus).unwrap()), (2, 2, "cpu cpu | cpu cpu".to_owned()));
    let cards = format!("{}{}", listed(&["cuda:0", "cuda:1"]), parallel("tensor_parallel_size = 2"));
    let found = lines(&layered(&cards).unwrap_err(), &place);
    assert!(found[0].contains("2 replicas of 2 ranks, but [[node]] lists 2 devices; list 4"), "{found:?}");
    assert_eq!(
        shown(&layered(&listed(&["cuda:0", "cuda:1"])).unwrap()),
        (1, 2, "cuda:0 | cuda:1".to_owned())
    );
    let variable = [("CONSORT_PARALLEL__DATA_PARALLEL_SIZE", "3")];
    let of_variable = place.layered(&format!("{MODEL}{}", parallel(two)), &variable, &Overrides::default());
    assert_eq!(shown(&of_variable.unwrap()).1, 3);

    // Written and read again.
    let written = place.load(&format!("{}{}", listed(&gpus), parallel(&all))).unwrap().to_toml();
    assert_eq!(load(&written), expected);
    let built =
        Topology::builder(place.path().join("tiny.gguf")).tensor_parallel_size(2).data_parallel_size(3);
    assert_eq!(shown(&built.build().unwrap()).1, 3);
}

#[test]
fn devices_that_do_not_do_for_the_replicas_are_refused_at_their_key() {
    let place = Place::new();
    let refused =
        |devices: &[&str], keys: &str| place.refused(&format!("{}[parallel]\n{keys}\n", listed(devices)));
    let odd = refused(&["cuda:0", "cuda:1", "cuda:2"], "data_parallel_size = 2");
    let told = "three.toml:6:22: parallel.data_parallel_size: 2 replicas, but [[node]] lists 3 devices; list as many \
                devices for each replica, those of replica 0 first";
    assert_eq!(odd, [told]);
    let few = refused(&["cpu", "cpu", "cpu", "cpu"], "tensor_parallel_size = 3\ndata_parallel_size = 2");
    let told = "three.toml:6:24: parallel.tensor_parallel_size: 2 replicas of 3 ranks, but [[node]] lists 4 devices; \
                list 6: those of replica 0 first";
    assert_eq!(few, [told]);
    let many =
        place.refused(&format!("{MODEL}[parallel]\ntensor_parallel_size = 64\ndata_parallel_size = 64\n"));
    assert!(
        many[0].ends_with("64 replicas of 64 ranks are too many; use at most 1024 ranks in all"),
        "{many:?}"
    );
    // Replicas share no card either.
    let same = refused(&["cuda:0", "cuda:1", "cuda:0", "cuda:2"], "data_parallel_size = 2");
    assert!(same.len() == 1 && same[0].contains("is listed twice"), "{same:?}");
    // Shares are those of one replica's ranks.
    let shares = refused(&["cpu", "cpu", "cpu", "cpu"], "data_parallel_size = 2\nweights = [1, 1, 1, 1]");
    assert!(shares[0].contains("parallel.weights: 4 weights for 2 ranks"), "{shares:?}");
    for (name, table) in [("dp = 2", "parallel"), ("replicas = 2", "parallel")] {
        let found = place.refused(&format!("{MODEL}[{table}]\n{name}\n"));
        assert!(found[0].contains("did you mean `data_parallel_size` in [parallel]?"), "{found:?}");
    }
}

#[test]
fn answers_that_do_not_depend_on_company_are_a_choice_on_gpus_alone() {
    let place = Place::new();
    let invariant = |devices: &[&str], keys: &str| {
        place.load(&format!("{}[parallel]\n{keys}\n", listed(devices))).unwrap().batch_invariant()
    };
    assert!(!invariant(&["cuda:0"], ""));
    assert!(!invariant(&["cuda:0"], "batch_invariant = false"));
    assert!(invariant(&["cuda:0"], "batch_invariant = true"));
    assert!(invariant(&["cpu"], ""));
    assert!(invariant(&["cpu"], "batch_invariant = false"), "a CPU computes in no other way");
}

#[test]
fn yes_and_no_are_written_as_each_layer_writes_them() {
    let place = Place::new();
    let text = listed(&["cuda:0"]);
    let variable =
        |value| place.layered(&text, &[("CONSORT_PARALLEL__BATCH_INVARIANT", value)], &Overrides::default());
    let of = |topology: Topology| topology.batch_invariant();
    assert_eq!(["true", "1", " TRUE "].map(|value| variable(value).map(of).unwrap()), [true; 3]);
    assert_eq!(["false", "0"].map(|value| variable(value).map(of).unwrap()), [false; 2]);
    let found = lines(&variable("yes").unwrap_err(), &place);
    assert!(found[0].ends_with("`yes` where true or false is expected; give true or false"), "{found:?}");

    let in_file = |keys: &str| place.refused(&format!("{text}[parallel]\n{keys}\n"))[0].clone();
    assert!(in_file("batch_invariant = \"true\"").ends_with("; write true without quotes"));
    assert!(in_file("batch_invariant = 0").ends_with("; write false"));
    assert!(in_file("batch_invariant = 2").ends_with("; give true or false, such as true"));
    assert!(in_file("batch_invarient = true").ends_with("did you mean `batch_invariant`?"));
    assert!(in_file("deterministic = true").ends_with("did you mean `batch_invariant` in [parallel]?"));
}

#[test]
fn ranks_on_gpus_are_processes_where_that_is_said_or_the_default_of_who_asks() {
    let place = Place::new();
    let with = |devices: &str, isolation: Option<&str>, isolates_gpus| {
        let overrides = Overrides {
            devices: Some(devices.to_owned()),
            isolation: isolation.map(str::to_owned),
            isolates_gpus,
            ..Overrides::default()
        };
        place.layered("[model]\npath = \"tiny.gguf\"\n", &[], &overrides).unwrap()
    };
    for (devices, given, isolates_gpus, expected) in [
        ("cuda:0,cuda:1", None, false, Isolation::Thread),
        ("cuda:0,cuda:1", None, true, Isolation::Process),
        ("cuda:0,cuda:1", Some("thread"), true, Isolation::Thread),
        ("cuda:0,cuda:1", Some("process"), false, Isolation::Process),
        ("cpu,cpu", None, true, Isolation::Thread),
        ("cpu,cpu", Some("process"), false, Isolation::Process),
    ] {
        let isolation = with(devices, given, isolates_gpus).isolation();
        assert_eq!(isolation, expected, "{devices} {given:?} {isolates_gpus}");
    }
    let written = with("cuda:0", None, true).to_toml();
    assert!(written.contains("isolation = \"process\"\n"), "{written}");
}
