use std::time::Instant;

use super::*;

/// Words of a device, in two buffers.
fn words(device: &Arc<CudaDevice>) -> [DeviceBuffer<u32>; 2] {
    let mut plan = ArenaPlan::new();
    let parts = [plan.reserve::<u32>(3, "some"), plan.reserve::<u32>(2, "others")];
    let arena = plan.allocate(device).unwrap();
    parts.map(|part| arena.buffer(part))
}

/// Takes what is under way, however long it is.
fn taken(landing: &mut Landing, patience: Duration) -> Vec<u32> {
    let started = Instant::now();
    loop {
        if let Some(words) = landing.take(patience, started, LIMIT).unwrap() {
            return words.to_vec();
        }
    }
}

#[test]
fn software_driver_words_of_two_steps_land_each_in_its_place_while_the_second_is_under_way() {
    let test = "software_driver_words_of_two_steps_land_each_in_its_place_while_the_second_is_under_way";
    in_every_order(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        let [mut some, mut others] = words(&device);
        let mut landings = [5, 5].map(|room| Landing::new(&device, room).unwrap());
        for round in 0..4u32 {
            for (at, landing) in landings.iter_mut().enumerate() {
                let first = 10 * round + 5 * at as u32;
                device.upload(&[first, first + 1, first + 2], some.all_mut()).unwrap();
                device.upload(&[first + 3, first + 4], others.all_mut()).unwrap();
                landing.fetch(&[some.slice(0..3), others.slice(0..2)]).unwrap();
            }
            let [first, second] = &mut landings;
            let patience = if round % 2 == 0 { LIMIT } else { Duration::ZERO };
            let expected: Vec<u32> = (10 * round..10 * round + 10).collect();
            assert_eq!([taken(first, patience), taken(second, patience)].concat(), expected);
        }
        // Without words it is the end of the work that is told.
        landings[0].fetch(&[]).unwrap();
        assert_eq!(taken(&mut landings[0], LIMIT), [0; 0]);
        // Given back with copies under way.
        landings[1].fetch(&[some.all()]).unwrap();
    });
}

#[test]
fn software_driver_words_that_are_too_many_not_under_way_or_under_way_already_are_refused() {
    let test = "software_driver_words_that_are_too_many_not_under_way_or_under_way_already_are_refused";
    over_driver(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        let [some, others] = words(&device);
        let mut landing = Landing::new(&device, 4).unwrap();
        let started = Instant::now();
        assert!(matches!(landing.take(LIMIT, started, LIMIT), Err(CudaError::Misuse { .. })));
        assert!(matches!(landing.fetch(&[some.all(), others.all()]), Err(KernelError::Length { .. })));
        landing.fetch(&[others.all()]).unwrap();
        assert!(landing.fetch(&[others.all()]).is_err());
        landing.reset();
        landing.fetch(&[some.all()]).unwrap();
        assert_eq!(taken(&mut landing, LIMIT).len(), 3);
    });
}

#[test]
fn software_driver_words_of_a_device_that_hangs_are_waited_for_as_long_as_the_step_may_take() {
    let test = "software_driver_words_of_a_device_that_hangs_are_waited_for_as_long_as_the_step_may_take";
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuMemcpyDtoHAsync_v2:1=hang")];
    let report = report_of(module_path!(), test, &faults, |settings| {
        let device = open(settings, "cuda:0");
        let [some, _] = words(&device);
        let mut landing = Landing::new(&device, 4).unwrap();
        landing.fetch(&[some.all()]).unwrap();
        let (started, limit) = (Instant::now(), Duration::from_millis(50));
        assert_eq!(landing.take(Duration::from_millis(2), started, limit), Ok(None));
        assert!(!device.is_late());
        let late = landing.take(LIMIT, started, limit);
        assert!(matches!(late, Err(CudaError::Timeout { seconds: 1, .. })), "{late:?}");
        assert!(device.is_late() && started.elapsed() < LIMIT);
    });
    assert!(report.is_none_or(|report| report.violations == 0));
}
