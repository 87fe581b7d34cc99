use super::*;

#[test]
fn a_whole_machine_has_no_gaps_and_aligned_lines() {
    let facts = Facts { embedded_cubins: vec!["sm_90a".to_owned()], ..machine(vec![card(0), card(1)]) };
    let expected = "\
Consort 0.1.0

Driver
  kernel module  570.86.15
  library        /lib/libcuda.so.1
  CUDA           up to 12.8
  version        570.86.15

Cards
  cuda:0         NVIDIA H100 80GB HBM3, compute capability 9.0
    identity     GPU-8f6d0f0e-0123-4567-89ab-cdef00010200, PCI 0000:07:00.0
    memory       85.0 GB, free 84.5 GB; 132 multiprocessors
    kernels      built in, for sm_90a
  cuda:1         NVIDIA H100 80GB HBM3, compute capability 9.0
    identity     GPU-8f6d0f0e-0123-4567-89ab-cdef00010201, PCI 0000:17:00.0
    memory       85.0 GB, free 84.5 GB; 132 multiprocessors
    kernels      built in, for sm_90a

Links, from the card of the line to that of the column
                 cuda:0   cuda:1
  cuda:0         -        NVLink
  cuda:1         NVLink   -

Libraries
  cuBLASLt       12.9.1, /lib/libcublasLt.so.12
  NVRTC          12.9, /lib/libnvrtc.so.12
  NCCL           2.27.3, /lib/libnccl.so.2

CUDA kernels
  built in       sm_90a
  cache          /root/.cache/consort/cubins
                 3 cubins, 150.0 kB; writable

Host
  CPU            A Processor; 16 cores for this process
  instructions   avx2; available: portable, avx2
  memory         128.0 GB, available 120.0 GB
  huge pages     transparent: madvise
                 explicit: 0 of 2048 KiB, 0 free; not used
  locked memory  no limit

A model can be served on
  cpu            16 cores with avx2
  cuda:0         NVIDIA H100 80GB HBM3
  cuda:1         NVIDIA H100 80GB HBM3
";
    assert_eq!(text(&facts), expected);
}

#[test]
fn a_machine_without_a_card_is_fine_for_serving_on_cpus() {
    let facts = Facts { cards_on_bus: Some(0), ..without_cuda() };
    let text = text(&facts);
    assert_eq!(
        gaps(&text),
        [
            "no CUDA driver, and no NVIDIA card on the PCI bus -> nothing to do for serving on CPUs; for GPUs, a \
          machine with one"
        ]
    );
    assert!(text.contains("    looked at    the loader's path: libcuda.so.1: no such file\n"), "{text}");
    assert!(
        text.contains("  cuBLASLt       not found; for GPUs, `pip install nvidia-cublas-cu12`"),
        "{text}"
    );
    assert!(text.contains("  NCCL           not found, and not used yet"), "{text}");
    assert!(text.ends_with("A model can be served on\n  cpu            16 cores with avx2\n"), "{text}");
}

#[test]
fn a_missing_driver_is_a_gap_of_a_machine_with_cards_and_of_one_that_does_not_tell() {
    let with = |cards_on_bus| text(&Facts { cards_on_bus, ..without_cuda() });
    let three = with(Some(3));
    assert_eq!(gaps(&three).len(), 1);
    assert!(gaps(&three)[0].starts_with(
        "no CUDA driver for the 3 NVIDIA cards on the PCI bus -> install NVIDIA's driver for CUDA 12.0"
    ));
    let unknown = with(None);
    assert!(
        gaps(&unknown)[0]
            .starts_with("no CUDA driver -> nothing to do for serving on CPUs; for GPUs, install")
    );
    let value = Some("/nowhere".to_owned());
    let variable = facts::Variable { name: "CONSORT_CUDA_LIB_PATH".to_owned(), value };
    let named = text(&Facts { environment: vec![variable], ..without_cuda() });
    let [gap] = gaps(&named)[..] else { panic!("one gap: {named}") };
    assert!(
        gap.ends_with("CONSORT_CUDA_LIB_PATH, which is set, must name the folder of libcuda.so.1"),
        "{gap}"
    );
}

#[test]
fn a_driver_of_no_use_says_why_and_what_to_do() {
    let with = |driver| text(&Facts { driver, ..without_cuda() });
    let old = with(Driver::TooOld { file: "/old".into(), problem: "it is for CUDA 11.4".to_owned() });
    assert!(
        gaps(&old)[0].starts_with("the driver is too old: it is for CUDA 11.4 -> install NVIDIA's driver")
    );
    let none = with(Driver::NoDevice(problem("the driver finds none", &[])));
    assert!(gaps(&none)[0].starts_with("the driver has no card for this process: the driver finds none -> "));
    let failed = with(Driver::Failed(problem("cuInit says CUDA_ERROR_UNKNOWN (999)", &[])));
    assert!(gaps(&failed)[0].contains("(999) -> see `nvidia-smi`"));
    let silent = with(Driver::Unanswered(problem("it did not answer within 60 s", &[])));
    assert!(gaps(&silent)[0].starts_with("nothing is known of CUDA: it did not answer within 60 s -> "));
    assert!(!silent.contains("cuBLASLt"), "nobody asked for it: {silent}");
}

#[test]
fn an_old_card_is_named_and_nothing_is_served_on_it() {
    let reason = "a GPU of compute capability 7.5 is too old: the kernels need 8.0 (A100) or newer";
    let old = Card {
        name: "Quadro RTX 6000".to_owned(),
        compute_capability: "7.5".to_owned(),
        kernels: Kernels::Unsupported { problem: reason.to_owned() },
        ..card(0)
    };
    let facts = machine(vec![old]);
    let text = text(&facts);
    assert_eq!(gaps(&text), [format!("cuda:0: {reason} -> use a newer card, or the CPU")]);
    assert!(text.contains("    kernels      none for such a card\n"), "{text}");
    assert_eq!(report(&facts, None).can_serve(), ["cpu"]);
    let verdict = judge(&[Asked::flag(WantedDevice::AnyCard)], &facts);
    assert_eq!(verdict.unusable(), ["cuda"]);
    let named = judge(&ranks(&["cuda:0"]), &facts);
    assert_eq!(named.gaps[0].what, "cuda:0 cannot be used: the kernels do not support it");
}

#[test]
fn of_three_cards_two_are_peers_and_the_third_is_told() {
    let facts = Facts { links: links(3, &[(0, 1)]), ..machine(vec![card(0), card(1), card(2)]) };
    let text = text(&facts);
    let matrix = "
                 cuda:0   cuda:1   cuda:2
  cuda:0         -        NVLink   no
  cuda:1         NVLink   -        no
  cuda:2         no       no       -
                 no: they cannot
";
    assert!(text.contains(matrix), "{text}");
    let [gap] = gaps(&text)[..] else { panic!("one gap: {text}") };
    let pairs = "no access to the memory of cuda:2 from cuda:0, cuda:2 from cuda:1, cuda:0 from cuda:2, cuda:1 from \
                 cuda:2";
    assert!(gap.starts_with(&format!("{pairs} -> such cards cannot be ranks of one model")), "{gap}");

    assert!(judge(&ranks(&["cuda:0", "cuda:1"]), &facts).unusable().is_empty());
    let apart = judge(&ranks(&["cuda:0", "cuda:2"]), &facts);
    assert_eq!(apart.unusable(), ["cuda:2"]);
    assert_eq!(apart.gaps[0].what, "cuda:0 and cuda:2 cannot read each other's memory");
    // Who asks by a flag asks for each by itself.
    let each: Vec<Asked> = wanted(&["cuda:0", "cuda:2"]).into_iter().map(Asked::flag).collect();
    assert!(judge(&each, &facts).unusable().is_empty());
}

#[test]
fn links_without_nvml_are_told_as_far_as_the_driver_tells() {
    let mut facts = machine(vec![card(0), card(1)]);
    for link in &mut facts.links {
        (link.nvlink, link.atomics) = (None, link.from == 0);
    }
    facts.nvlink_problem = Some(problem("no usable NVML", &["/x: not there"]));
    let text = text(&facts);
    assert!(text.contains("  cuda:0         -        atomics\n  cuda:1         yes      -\n"), "{text}");
    assert!(text.contains("  NVLink         not told: no usable NVML\n"), "{text}");
    assert!(gaps(&text).is_empty(), "{text}");
}

#[test]
fn cards_are_found_by_uuid_and_each_rank_needs_its_own() {
    let facts = machine(vec![card(0), card(1)]);
    let uuid = "cuda:GPU-8f6d0f0e-0123-4567-89ab-cdef00010201";
    let found = judge(&ranks(&["cuda:0", uuid]), &facts);
    assert_eq!(found.devices.iter().map(|answer| answer.card).collect::<Vec<_>>(), [Some(0), Some(1)]);
    let twice = judge(&ranks(&["cuda:1", uuid]), &facts);
    assert_eq!(twice.unusable(), [uuid]);
    assert_eq!(twice.gaps[0].what, format!("cuda:1 and {uuid} are one card"));
    let absent = judge(&ranks(&["cpu", "cuda:5"]), &facts);
    assert_eq!(absent.unusable(), ["cuda:5"]);
    assert_eq!(absent.gaps[0].what, "cuda:5 is not there");
    assert!(absent.gaps[0].remedy.starts_with("there are cuda:0, cuda:1;"), "{:?}", absent.gaps);
}

#[test]
fn a_card_without_kernels_without_memory_or_without_answer_is_a_gap() {
    let nowhere = Kernels::Nowhere {
        architecture: "sm_121".to_owned(),
        problem: "NVRTC 12.3 compiles for sm_90 only".to_owned(),
    };
    let cards = vec![
        Card { kernels: nowhere, ..card(0) },
        Card { free_bytes: Some(8_000_000_000), ..card(1) },
        Card { free_bytes: None, ..card(2) },
    ];
    let facts = machine(cards);
    let text = text(&facts);
    let [kernels, memory, closed] = gaps(&text)[..] else { panic!("three gaps: {text}") };
    assert!(kernels.starts_with(
        "cuda:0: this build has no kernels for sm_121, and NVRTC 12.3 compiles for sm_90 only -> `pip install"
    ));
    assert!(memory.starts_with("cuda:1: 8.0 GB of 85.0 GB are free -> 90 % are used unless"), "{memory}");
    assert!(closed.starts_with("cuda:2 cannot be opened -> "), "{closed}");
    assert_eq!(report(&facts, None).can_serve(), ["cpu", "cuda:1"]);
}

#[test]
fn missing_libraries_are_gaps_where_cards_want_them() {
    let compiled =
        Kernels::Nowhere { architecture: "sm_90a".to_owned(), problem: "there is no NVRTC".to_owned() };
    let libraries = without_cuda().libraries;
    let facts = Facts { libraries, ..machine(vec![Card { kernels: compiled, ..card(0) }]) };
    let text = text(&facts);
    let [kernels, cublaslt] = gaps(&text)[..] else { panic!("two gaps: {text}") };
    assert!(kernels.contains("there is no NVRTC -> `pip install nvidia-cuda-nvrtc-cu12`"), "{kernels}");
    assert!(cublaslt.starts_with("no usable cuBLASLt -> `pip install nvidia-cublas-cu12`"), "{cublaslt}");
    let built_in = Facts { libraries: without_cuda().libraries, ..machine(vec![card(0)]) };
    assert!(super::text(&built_in).contains("NVRTC          not found, and not needed"));
}

#[test]
fn a_cache_that_cannot_be_written_is_a_gap_and_so_is_none() {
    let mut facts = machine(vec![card(0)]);
    if let Some(cache) = &mut facts.cubin_cache {
        cache.problem = Some("Permission denied (os error 13)".to_owned());
    }
    let unwritable = text(&facts);
    assert!(unwritable.contains("3 cubins, 150.0 kB; not writable\n"), "{unwritable}");
    let [gap] = gaps(&unwritable)[..] else { panic!("one gap: {unwritable}") };
    assert!(gap.starts_with(
        "compiled kernels cannot be kept: Permission denied (os error 13) -> let CONSORT_CACHE_DIR"
    ));
    let none = text(&Facts { cubin_cache: None, ..facts });
    assert!(gaps(&none)[0].starts_with("no folder to keep compiled kernels in -> set CONSORT_CACHE_DIR"));
}

#[test]
fn gaps_of_the_host_say_what_to_do() {
    let mut facts = machine(vec![card(0)]);
    facts.host.transparent_huge_pages = Some("never".to_owned());
    facts.host.huge_pages = Some(HugePages { total: 10_000, free: 9_000, page_bytes: 2 << 20 });
    facts.host.locked_memory_limit_bytes = Some(65_536);
    facts.host.isa.asked = Some("avx512".to_owned());
    facts.host.isa.processor_has_amx = true;
    let text = text(&facts);
    let [isa, amx, transparent, explicit, locked] = gaps(&text)[..] else { panic!("five gaps: {text}") };
    assert!(
        isa.starts_with(
            "the environment asks for the instruction set avx512, which is not to be had -> unset"
        )
    );
    assert!(
        amx.starts_with(
            "the processor has AMX, and the system does not let this process use it -> Linux 5.16"
        )
    );
    assert!(
        transparent.starts_with("transparent huge pages are off -> `echo madvise | sudo tee /sys/kernel/mm")
    );
    assert!(
        explicit.starts_with("18.9 GB are set aside as explicit huge pages, which Consort does not use -> ")
    );
    assert!(
        locked.starts_with("page-locked memory is limited to 65.5 kB -> `ulimit -l unlimited`"),
        "{locked}"
    );
    // Nothing is locked for CPUs.
    let host = facts.host.clone();
    assert!(!super::text(&Facts { host, ..without_cuda() }).contains("page-locked"));
}

#[test]
fn what_the_system_does_not_tell_is_no_gap() {
    let mut facts = Facts { cards_on_bus: None, ..machine(vec![card(0)]) };
    facts.host = Host {
        cpu_model: None,
        memory_bytes: None,
        available_bytes: None,
        transparent_huge_pages: None,
        huge_pages: None,
        ..facts.host
    };
    let text = text(&facts);
    assert!(gaps(&text).is_empty(), "{text}");
    assert!(text.contains("  CPU            not told by the system; 16 cores"), "{text}");
    assert!(text.contains("  memory         not told by the system\n"), "{text}");
}

#[test]
fn no_name_moves_the_cursor_of_a_terminal() {
    let facts = machine(vec![Card { name: "evil\u{1b}[2J\r\ncard".to_owned(), ..card(0) }]);
    let text = text(&facts);
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    assert!(text.contains("evil␛[2J␍␊card"), "{text}");
}

#[test]
fn the_names_of_the_json_are_stable() {
    let facts = machine(vec![card(0), card(1)]);
    let verdict = judge(&ranks(&["cuda:0", "cuda:7"]), &facts);
    let json = serde_json::to_value(report(&facts, Some(&verdict))).expect("JSON");
    let keys: Vec<&str> = json.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "version",
            "driver",
            "kernel_module_version",
            "cards_on_bus",
            "cards",
            "links",
            "nvlink_problem",
            "libraries",
            "embedded_cubins",
            "cubin_cache",
            "host",
            "environment",
            "asked",
            "can_serve",
            "gaps"
        ]
    );
    assert_eq!(json["driver"]["status"], "found");
    assert_eq!(json["driver"]["driver_version"], "570.86.15");
    let kernels = serde_json::json!({"from": "built_in", "architecture": "sm_90a"});
    assert_eq!(json["cards"][1]["kernels"], kernels);
    let link = serde_json::json!({"from": 0, "to": 1, "peer_access": true, "atomics": true, "nvlink": true});
    assert_eq!(json["links"][0], link);
    assert_eq!(json["libraries"]["nccl"]["version"], "2.27.3");
    let answer = serde_json::json!({"device": "cuda:7", "rank": 1, "is_usable": false, "card": null});
    assert_eq!(json["asked"]["devices"][1], answer);
    assert_eq!(json["can_serve"], serde_json::json!(["cpu", "cuda:0", "cuda:1"]));
    assert_eq!(json["gaps"][0]["about"], "asked");
    assert_eq!(json["gaps"][0]["what"], "cuda:7 is not there");
    let missing = serde_json::to_value(report(&without_cuda(), None)).expect("JSON");
    assert_eq!(missing["driver"]["status"], "missing");
    assert_eq!(missing["libraries"]["nvrtc"]["looked_at"], serde_json::json!(["/x: not there"]));
    assert_eq!(
        (&missing["asked"], &missing["gaps"][0]["about"]),
        (&serde_json::Value::Null, &"driver".into())
    );
}
