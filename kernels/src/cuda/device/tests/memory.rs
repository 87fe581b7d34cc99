use super::*;

#[test]
fn software_driver_an_arena_is_one_allocation_of_zeroed_parts() {
    let test = "software_driver_an_arena_is_one_allocation_of_zeroed_parts";
    let report = report_of(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        let (free_before, total) = device.memory().unwrap();
        let mut plan = ArenaPlan::new();
        let numbers = plan.reserve::<f32>(1000, "numbers");
        let halves = plan.reserve::<bf16>(77, "halves");
        let none = plan.reserve::<u32>(0, "none");
        let bytes = plan.bytes();
        let arena = plan.allocate(&device).unwrap();
        let (free, total_after) = device.memory().unwrap();
        assert_eq!((arena.bytes(), total), (bytes, total_after));
        assert!(free_before - free >= bytes, "{free_before} {free}");
        let (numbers, halves) = (arena.buffer(numbers), arena.buffer(halves));
        let none = arena.buffer(none);
        drop(arena);
        assert_eq!((numbers.len(), halves.len(), none.is_empty()), (1000, 77, true));
        assert!(numbers.address().is_multiple_of(256) && halves.address() == numbers.address() + 4096);
        assert_eq!(read(&device, &numbers), [0.0; 1000]);
        assert_eq!(read(&device, &halves), [bf16::ZERO; 77]);
        assert!(read(&device, &none).is_empty());
        drop(numbers);
        assert_eq!(device.memory().unwrap().0, free, "a part keeps the whole");
        drop((halves, none));
        assert_eq!(device.memory().unwrap().0, free_before);
        let empty = ArenaPlan::new().allocate(&device).unwrap();
        assert_eq!(empty.bytes(), 0);
    });
    if let Some(report) = report {
        assert_eq!((report.violations, report.leaked_bytes(), report.calls["cuMemAlloc_v2"]), (0, 0, 1));
    }
}

#[test]
fn software_driver_out_of_memory_names_wanted_and_free_bytes_and_the_largest_parts() {
    over_driver(
        module_path!(),
        "software_driver_out_of_memory_names_wanted_and_free_bytes_and_the_largest_parts",
        &[("CONSORT_SOFTWARE_DRIVER_MEMORY", "16777216")],
        |settings| {
            let device = open(settings, "cuda:0");
            let mut plan = ArenaPlan::new();
            plan.reserve::<f32>(1 << 20, "activations");
            plan.reserve::<bf16>(16 << 20, "KV pages");
            plan.reserve::<u32>(16, "page tables");
            let free = device.memory().unwrap().0;
            let error = plan.allocate(&device).unwrap_err();
            let CudaError::OutOfMemory { wanted, free: said, parts, .. } = &error else { panic!("{error}") };
            assert_eq!((*wanted, *said), (Some((36 << 20) + 256), Some(free)));
            let parts: Vec<&str> = parts.iter().map(|(what, _)| what.as_str()).collect();
            assert_eq!(parts, ["KV pages", "activations", "page tables"]);
            let text = error.to_string();
            assert!(
                text.contains("37748992 bytes (36.0 MiB) wanted")
                    && text.contains("KV pages 33554432 bytes (32.0 MiB)"),
                "{text}"
            );
            let mut plan = ArenaPlan::new();
            plan.reserve::<f32>(usize::MAX, "everything");
            assert!(matches!(plan.allocate(&device), Err(CudaError::OutOfMemory { .. })));
            // The device is as good as before.
            let mut plan = ArenaPlan::new();
            let part = plan.reserve::<u32>(4, "a few");
            let part = plan.allocate(&device).unwrap().buffer(part);
            assert_eq!(read(&device, &part), [0; 4]);
        },
    );
}

#[test]
fn software_driver_copies_through_the_ring_keep_their_order() {
    in_every_order(
        module_path!(),
        "software_driver_copies_through_the_ring_keep_their_order",
        &[],
        |settings| {
            let device = open(settings, "cuda:0");
            // Parts of any size, and more in all than the ring holds.
            let lens = [1, 3, 1000, 300_000, 7, 1_500_000, 64, 900_001];
            let mut plan = ArenaPlan::new();
            let parts: Vec<_> = lens.iter().map(|&len| plan.reserve::<u32>(len, "part")).collect();
            let arena = plan.allocate(&device).unwrap();
            let mut parts: Vec<_> = parts.into_iter().map(|part| arena.buffer(part)).collect();
            for round in 1..4u32 {
                for (at, part) in (0u32..).zip(&mut parts) {
                    let mut values: Vec<u32> =
                        (0..part.len() as u32).map(|i| i ^ (round << 20) ^ at).collect();
                    device.upload(&values, part.all_mut()).unwrap();
                    values.fill(u32::MAX);
                }
                for (at, part) in (0u32..).zip(&parts) {
                    let got = read(&device, part);
                    assert!(
                        got.iter().zip(0u32..).all(|(got, i)| *got == i ^ (round << 20) ^ at),
                        "{round} {at}"
                    );
                }
            }
            let part = &mut parts[2];
            device.zero(part.slice_mut(10..990)).unwrap();
            let got = read(&device, part);
            assert!(got[10..990].iter().all(|&x| x == 0) && got[9] != 0 && got[990] != 0);
            let short = device.upload(&[1, 2], part.slice_mut(0..3));
            assert!(matches!(short, Err(KernelError::Length { .. })), "{short:?}");
        },
    );
}

#[test]
fn software_driver_words_of_the_host_are_seen_by_threads_and_have_addresses() {
    over_driver(
        module_path!(),
        "software_driver_words_of_the_host_are_seen_by_threads_and_have_addresses",
        &[],
        |settings| {
            let device = open(settings, "cuda:0");
            let words = HostWords::new(&device, 3).unwrap();
            assert_eq!((words.count(), words.address(2) - words.address(0), words.address(0) % 4), (3, 8, 0));
            std::thread::scope(|scope| {
                scope.spawn(|| words.set(1, 7));
            });
            assert_eq!([0, 1, 2].map(|index| words.get(index)), [0, 7, 0]);
        },
    );
}

#[test]
fn software_driver_peers_reach_each_other_more_than_once() {
    over_driver(
        module_path!(),
        "software_driver_peers_reach_each_other_more_than_once",
        &[("CONSORT_SOFTWARE_DRIVER_DEVICES", "2")],
        |settings| {
            let (first, second) = (open(settings, "cuda:0"), open(settings, "cuda:1"));
            for _ in 0..2 {
                first.reach(second.facts().uuid).unwrap();
                second.reach(first.facts().uuid).unwrap();
                first.reach(first.facts().uuid).unwrap();
            }
        },
    );
}

#[test]
fn software_driver_copies_within_a_device_are_in_order_and_measured_work_is_done() {
    let test = "software_driver_copies_within_a_device_are_in_order_and_measured_work_is_done";
    let report = report_of(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        let mut plan = ArenaPlan::new();
        let (from, to) = (plan.reserve::<f32>(1000, "from"), plan.reserve::<f32>(1000, "to"));
        let arena = plan.allocate(&device).unwrap();
        let (mut from, mut to) = (arena.buffer(from), arena.buffer(to));
        let numbers: Vec<f32> = (0..1000).map(|at| at as f32).collect();
        device.upload(&numbers, from.all_mut()).unwrap();
        let took = device.measure(Duration::from_secs(60), || device.copy(from.all(), to.all_mut())).unwrap();
        assert!(took < Duration::from_secs(60), "{took:?}");
        device.zero(from.all_mut()).unwrap();
        assert_eq!(read(&device, &to), numbers);
        let short = device.copy(from.slice(0..10), to.all_mut()).unwrap_err().to_string();
        assert!(short.contains("copy"), "{short}");
    });
    if let Some(report) = report {
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0));
    }
}
