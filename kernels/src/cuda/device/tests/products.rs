use super::*;
use crate::{
    cuda::Launcher,
    linear::cuda::{Invariance, WeightView, Workspace, linear, rehearse, workspace_len},
    testing::emulated::bf16_rows,
};

/// A product of whole numbers, whose sums are exact: every order of summation has the same bits.
struct Product {
    shape: (usize, usize, usize),
    invariance: Invariance,
    /// Without the bias.
    sums: Vec<f32>,
    bias: Vec<f32>,
    x_buffer: DeviceBuffer<bf16>,
    weight_buffer: DeviceBuffer<bf16>,
    bias_buffer: DeviceBuffer<f32>,
    y: DeviceBuffer<f32>,
    partials: DeviceBuffer<f32>,
    arrivals: DeviceBuffer<u32>,
}

impl Product {
    /// `shape` is rows, outputs, inputs.
    fn new(device: &Arc<CudaDevice>, shape: (usize, usize, usize), invariance: Invariance) -> Product {
        let (rows, outputs, inputs) = shape;
        let mut numbers = Numbers(9);
        let mut integers = |len: usize| (0..len).map(|_| numbers.below(17) as f32 - 8.0).collect::<Vec<_>>();
        let (x, x_rows) = bf16_rows(&integers(rows * inputs), inputs);
        let (weight, weight_rows) = bf16_rows(&integers(outputs * inputs), inputs);
        let bias = integers(outputs);
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(a, b)| a * b).sum::<f32>();
        let sums = x.chunks_exact(inputs).flat_map(|x| weight.chunks_exact(inputs).map(move |w| dot(x, w)));
        let len = workspace_len(device.multiprocessors(), outputs, inputs, rows, invariance).unwrap();
        let mut plan = ArenaPlan::new();
        let (x_part, weight_part) =
            (plan.reserve(x_rows.len(), "x"), plan.reserve(weight_rows.len(), "weight"));
        let (bias_part, y_part) = (plan.reserve(outputs, "bias"), plan.reserve(rows * outputs, "y"));
        let partials = plan.reserve(len.partials.max(1 << 18), "partial sums");
        let arrivals = plan.reserve(len.arrivals, "arrivals");
        let arena = plan.allocate(device).unwrap();
        let mut product = Product {
            shape,
            invariance,
            sums: sums.collect(),
            bias,
            x_buffer: arena.buffer(x_part),
            weight_buffer: arena.buffer(weight_part),
            bias_buffer: arena.buffer(bias_part),
            y: arena.buffer(y_part),
            partials: arena.buffer(partials),
            arrivals: arena.buffer(arrivals),
        };
        device.upload(&x_rows, product.x_buffer.all_mut()).unwrap();
        device.upload(&weight_rows, product.weight_buffer.all_mut()).unwrap();
        device.upload(&product.bias, product.bias_buffer.all_mut()).unwrap();
        product
    }

    fn launch(&mut self, launcher: &dyn Launcher, biased: bool) -> Result<(), KernelError> {
        let (_, outputs, inputs) = self.shape;
        let weight = WeightView { values: self.weight_buffer.all(), outputs, inputs };
        let mut workspace =
            Workspace { partials: self.partials.all_mut(), arrivals: self.arrivals.all_mut() };
        let bias = biased.then(|| self.bias_buffer.all());
        let y = self.y.all_mut();
        linear(launcher, self.x_buffer.all(), weight, bias, y, &mut workspace, self.invariance)
    }

    /// Makes ready for up to as many rows as there are.
    fn rehearse(&mut self, launcher: &dyn Launcher) -> Result<(), KernelError> {
        let (rows, outputs, inputs) = self.shape;
        let weight = WeightView { values: self.weight_buffer.all(), outputs, inputs };
        let mut workspace =
            Workspace { partials: self.partials.all_mut(), arrivals: self.arrivals.all_mut() };
        let (x, y) = (self.x_buffer.slice(0..row_stride(inputs)), self.y.slice_mut(0..outputs));
        rehearse(launcher, x, weight, y, &mut workspace, (self.invariance, rows))
    }

    fn assert_right(&self, device: &CudaDevice, biased: bool) {
        let (_, outputs, _) = self.shape;
        for (at, (got, sum)) in read(device, &self.y).iter().zip(&self.sums).enumerate() {
            let expected = sum + if biased { self.bias[at % outputs] } else { 0.0 };
            assert!(*got == expected, "{:?}, biased {biased}, {at}: {got}, not {expected}", self.shape);
        }
    }
}

/// Products of some shapes; returns how many the library computed.
fn library_products(test: &str, shapes: &[(usize, usize, usize)], invariance: Invariance) -> Option<u64> {
    let report = report_of(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        println!("matrix library: {:?}", device.matrix_library());
        assert!(device.matrix_library().is_ok());
        for &shape in shapes {
            let mut product = Product::new(&device, shape, invariance);
            for biased in [false, true] {
                product.launch(&*device, biased).unwrap();
                product.assert_right(&device, biased);
            }
        }
    })?;
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
    Some(report.calls.get("cublasLtMatmul").copied().unwrap_or(0))
}

#[test]
fn software_driver_many_rows_are_the_librarys_where_bits_may_depend_on_their_number() {
    let test = "software_driver_many_rows_are_the_librarys_where_bits_may_depend_on_their_number";
    let shapes = [(65, 64, 40), (130, 24, 72), (80, 136, 16)];
    if let Some(products) = library_products(test, &shapes, Invariance::None) {
        assert_eq!(products, 6);
    }
}

#[test]
fn software_driver_few_rows_and_batch_invariance_are_never_the_librarys() {
    let test = "software_driver_few_rows_and_batch_invariance_are_never_the_librarys";
    let shapes = [(130, 24, 72)];
    if let Some(products) = library_products(test, &shapes, Invariance::Batch) {
        assert_eq!(products, 0);
    }
}

#[test]
fn software_driver_a_shape_that_the_library_refuses_is_multiplied_all_the_same() {
    let test = "software_driver_a_shape_that_the_library_refuses_is_multiplied_all_the_same";
    // Every proposal of an algorithm fails.
    let faults: String = (1..10).map(|call| format!("cublasLtMatmulAlgoGetHeuristic:{call}=15,")).collect();
    let report = report_of(
        module_path!(),
        test,
        &[("CONSORT_SOFTWARE_DRIVER_FAULTS", faults.trim_end_matches(','))],
        |settings| {
            let device = open(settings, "cuda:0");
            for shape in [(65, 64, 40), (67, 61, 33), (70, 1, 9)] {
                let mut product = Product::new(&device, shape, Invariance::None);
                product.launch(&*device, true).unwrap();
                product.assert_right(&device, true);
            }
        },
    );
    if let Some(report) = report {
        let products = report.calls.get("cublasLtMatmul").copied().unwrap_or(0);
        assert_eq!((report.violations, report.leaked_bytes(), products), (0, 0, 0), "{report:#?}");
    }
}

#[test]
fn software_driver_outputs_and_rows_of_odd_width_are_right_whoever_multiplies() {
    let test = "software_driver_outputs_and_rows_of_odd_width_are_right_whoever_multiplies";
    let shapes = [(67, 61, 33), (129, 7, 130), (65, 1, 9)];
    if let Some(products) = library_products(test, &shapes, Invariance::None) {
        println!("{products} of 6 were the library's");
    }
}

#[test]
fn software_driver_products_of_the_library_replay_from_a_graph() {
    let test = "software_driver_products_of_the_library_replay_from_a_graph";
    let report = report_of(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        let mut product = Product::new(&device, (66, 32, 24), Invariance::None);
        let graph = device.capture(|launcher| product.launch(launcher, true)).unwrap();
        assert_eq!(graph.launches(), 1);
        for _ in 0..3 {
            device.zero(product.y.all_mut()).unwrap();
            device.launch_graph(&graph).unwrap();
            product.assert_right(&device, true);
        }
    });
    if let Some(report) = report {
        let products = report.calls["cublasLtMatmul"];
        assert_eq!((report.violations, report.leaked_bytes(), products), (0, 0, 1), "{report:#?}");
    }
}

/// What the library was asked: to choose, and to multiply.
fn asked(report: &Report) -> [u64; 2] {
    ["cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmul"]
        .map(|name| report.calls.get(name).copied().unwrap_or(0))
}

#[test]
fn software_driver_after_a_rehearsal_nothing_is_chosen_or_multiplied_for_the_first_time() {
    let test = "software_driver_after_a_rehearsal_nothing_is_chosen_or_multiplied_for_the_first_time";
    let report = report_of(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        let mut product = Product::new(&device, (300, 64, 40), Invariance::None);
        product.rehearse(&*device).unwrap();
        device.synchronize("rehearse", LIMIT).unwrap();
        for _ in 0..2 {
            product.launch(&*device, false).unwrap();
            product.assert_right(&device, false);
        }
    });
    if let Some(report) = report {
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:#?}");
        let [chosen, multiplied] = asked(&report);
        // For up to 128, 192, 256 and 320 rows.
        assert_eq!(chosen, 4, "{report:#?}");
        assert!((3..=6).contains(&multiplied), "each algorithm once, and the two products: {report:#?}");
    }
}

#[test]
fn software_driver_nothing_is_rehearsed_that_the_library_never_multiplies() {
    let test = "software_driver_nothing_is_rehearsed_that_the_library_never_multiplies";
    let report = report_of(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        for (rows, invariance) in [(300, Invariance::Batch), (64, Invariance::None)] {
            Product::new(&device, (rows, 64, 40), invariance).rehearse(&*device).unwrap();
        }
    });
    if let Some(report) = report {
        assert_eq!((report.violations, asked(&report)), (0, [0, 0]), "{report:#?}");
    }
}
