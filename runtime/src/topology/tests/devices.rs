//! GPUs: how they are named, and what may stand beside each other.

use super::{MODEL, Overrides, Place, Topology, lines};
use crate::topology::{CudaCard, DeviceSpec};

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
