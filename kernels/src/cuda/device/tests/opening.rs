use std::time::Instant;

use super::*;

#[test]
fn a_machine_without_cuda_is_a_typed_error_within_a_second() {
    let folder = Folder::new("no-cuda");
    let settings = Settings { library: Some(folder.path().to_path_buf()), ..Settings::default() };
    let started = Instant::now();
    let error = CudaDevice::open(&Selector::Ordinal(0), &settings).unwrap_err();
    assert!(started.elapsed().as_millis() < 1000, "{:?}", started.elapsed());
    assert!(matches!(error, CudaError::NoDriver { .. }), "{error}");
    let text = error.to_string();
    for part in ["no CUDA driver", "libcuda.so.1: not there", "device = \"cpu\"", "CONSORT_CUDA_LIB_PATH"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(devices(&settings), Err(error.clone()));
    assert_eq!(links(&settings), Err(error));
    let [driver, matrices] = libraries(&settings);
    assert!(driver.is_err() && matrices.is_err(), "{driver:?} {matrices:?}");
}

#[test]
fn a_library_that_is_not_the_driver_is_refused_for_what_it_lacks() {
    let folder = Folder::new("not-the-driver");
    let library = crate::cuda::testing::shared_library(&folder, "int cuInit(unsigned flags) { return 0; }");
    std::fs::rename(library, folder.path().join("libcuda.so.1")).unwrap();
    let settings = Settings { library: Some(folder.path().to_path_buf()), ..Settings::default() };
    let error = CudaDevice::open(&Selector::Ordinal(0), &settings).unwrap_err();
    assert!(error.to_string().contains("is too old: it has no cuDriverGetVersion"), "{error}");
}

#[test]
fn software_driver_devices_are_listed_with_what_is_known_of_them() {
    let memory = [("CONSORT_SOFTWARE_DRIVER_DEVICES", "3"), ("CONSORT_SOFTWARE_DRIVER_MEMORY", "67108864")];
    over_driver(
        module_path!(),
        "software_driver_devices_are_listed_with_what_is_known_of_them",
        &memory,
        |settings| {
            let found = devices(settings).unwrap();
            assert_eq!(found.iter().map(|facts| facts.ordinal).collect::<Vec<_>>(), [0, 1, 2]);
            for facts in &found {
                assert_eq!((facts.memory_bytes, facts.capability), (64 << 20, (9, 0)));
                assert!(facts.multiprocessors > 0 && facts.shared_bytes_max >= 96 << 10, "{facts:?}");
                assert!(!facts.name.is_empty() && facts.pci.contains(':'), "{facts:?}");
                let others: Vec<u32> = (0..3).filter(|&other| other != facts.ordinal).collect();
                assert_eq!(facts.peers, others);
            }
            let found_links = links(settings).unwrap();
            let pairs: Vec<_> = found_links.iter().map(|link| (link.from, link.to)).collect();
            assert_eq!(pairs, [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]);
            assert!(found_links.iter().all(|link| link.reaches && link.atomics), "{found_links:?}");
            assert!(found[0].uuid != found[1].uuid && found[1].uuid != found[2].uuid);
            for library in libraries(settings) {
                let library = library.unwrap();
                assert!(library.file.starts_with(consort_software_driver::folder()), "{library:?}");
            }
        },
    );
}

#[test]
fn software_driver_only_the_device_asked_for_its_free_memory_is_opened_and_not_for_long() {
    let test = "software_driver_only_the_device_asked_for_its_free_memory_is_opened_and_not_for_long";
    let memory = [("CONSORT_SOFTWARE_DRIVER_DEVICES", "3"), ("CONSORT_SOFTWARE_DRIVER_MEMORY", "67108864")];
    let report = report_of(module_path!(), test, &memory, |settings| {
        devices(settings).unwrap();
        links(settings).unwrap();
        assert_eq!(free_bytes(settings, 1), Ok(64 << 20));
        let error = free_bytes(settings, 3).unwrap_err();
        assert!(matches!(&error, CudaError::NoDevice { wanted, .. } if wanted == "cuda:3"), "{error}");
    });
    if let Some(report) = report {
        let calls = |name: &str| report.calls.get(name).copied();
        assert_eq!(calls("cuDevicePrimaryCtxRetain"), Some(1), "{report:#?}");
        assert_eq!(calls("cuDevicePrimaryCtxRelease_v2"), Some(1), "{report:#?}");
    }
}

#[test]
fn software_driver_devices_open_by_ordinal_and_by_the_beginning_of_a_uuid() {
    over_driver(
        module_path!(),
        "software_driver_devices_open_by_ordinal_and_by_the_beginning_of_a_uuid",
        &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "3")],
        |settings| {
            let all = devices(settings).unwrap();
            let second = open(settings, "cuda:1");
            assert_eq!((second.facts().ordinal, second.facts().uuid), (1, all[1].uuid));
            let uuid = all[2].uuid.to_string();
            assert_eq!(open(settings, &format!("cuda:{uuid}")).facts().ordinal, 2);
            let differs = (5..=uuid.len())
                .find(|&end| {
                    all.iter().filter(|other| other.uuid.to_string().starts_with(&uuid[..end])).count() == 1
                })
                .unwrap();
            assert_eq!(open(settings, &format!("cuda:{}", &uuid[..differs])).facts().ordinal, 2);
            let error = CudaDevice::open(&Selector::Ordinal(3), settings).unwrap_err().to_string();
            assert!(error.contains("no CUDA device cuda:3: it is not there"), "{error}");
            assert!(all.iter().all(|facts| error.contains(&facts.uuid.to_string())), "{error}");
            if differs > 5 {
                let beginning = format!("cuda:{}", &uuid[..differs - 1]).parse().unwrap();
                let error = CudaDevice::open(&beginning, settings).unwrap_err().to_string();
                assert!(error.contains("several begin so"), "{error}");
            }
        },
    );
}

#[test]
fn software_driver_no_device_at_all_is_a_typed_error() {
    let test = "cuda::device::tests::opening::software_driver_no_device_at_all_is_a_typed_error";
    in_child(test, &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "0")], || {
        let error = CudaDevice::open(&Selector::Ordinal(0), &Settings::of_process()).unwrap_err();
        assert!(matches!(error, CudaError::NoDevice { .. }), "{error}");
    });
}
