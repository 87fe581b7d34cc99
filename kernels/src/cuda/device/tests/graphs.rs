use super::{
    operations::{Given, Step, assert_step},
    *,
};
use crate::cuda::Launcher;

#[test]
fn software_driver_a_graph_replays_over_changed_numbers() {
    for order in each(&ORDERS) {
        let test = "software_driver_a_graph_replays_over_changed_numbers";
        let order = [("CONSORT_SOFTWARE_DRIVER_ORDER", *order)];
        let report = report_of(module_path!(), test, &order, |settings| {
            let device = open(settings, "cuda:0");
            let given = Given::new(3);
            let mut step = Step::new(&device, &given);
            let graph = device.capture(|launcher| step.launch(launcher)).unwrap();
            assert_eq!(graph.launches(), 3);
            assert!(read(&device, &step.out).iter().all(|x| x.to_bits() == 0), "recording runs nothing");
            for seed in [4, 5, 6] {
                // Other weights would be another step: only the residual changes.
                let other = Given::new(3).with_residual_of(&Given::new(seed));
                device.upload(&other.residual, step.residual.all_mut()).unwrap();
                device.launch_graph(&graph).unwrap();
                let got = read(&device, &step.out);
                assert_step(&got, &other, device.multiprocessors(), &format!("replay {seed}"));
            }
            // The graph keeps what it uses.
            drop(step);
            device.launch_graph(&graph).unwrap();
            device.synchronize("replay", LIMIT).unwrap();
        });
        if let Some(report) = report {
            assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
            assert_eq!((report.launches, report.graph_launches), (0, 4));
        }
    }
}

#[test]
fn software_driver_a_recording_that_fails_leaves_the_device_as_it_was() {
    over_driver(
        module_path!(),
        "software_driver_a_recording_that_fails_leaves_the_device_as_it_was",
        &[],
        |settings| {
            let device = open(settings, "cuda:0");
            let given = Given::new(7);
            let mut step = Step::new(&device, &given);
            let refused = KernelError::Unsupported { operation: "test", reason: "half a step".into() };
            let error = device.capture(|launcher| {
                step.launch(launcher)?;
                Err(refused.clone())
            });
            assert_eq!(error.unwrap_err(), refused);
            let nested = device.capture(|_| device.capture(|_| Ok(())).map(drop));
            assert!(nested.unwrap_err().to_string().contains("is being recorded already"));
            let graph = device.capture(|launcher| step.launch(launcher)).unwrap();
            device.upload(&given.residual, step.residual.all_mut()).unwrap();
            device.launch_graph(&graph).unwrap();
            assert_step(&read(&device, &step.out), &given, device.multiprocessors(), "after a failure");
            let again = open(settings, "cuda:0");
            assert!(matches!(again.launch_graph(&graph), Err(CudaError::Misuse { .. })));
        },
    );
}
