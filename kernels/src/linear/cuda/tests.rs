use consort_emulator::{Copies, Memory, Order, Settings};

use super::*;
use crate::testing::{
    Numbers, assert_same_bits,
    emulated::{Emulated, device_slice, device_slice_mut},
};

const SMALL_DEVICE: u32 = 4;

/// The ways that find most, for shapes that are too large for all.
fn hard_ways() -> impl Iterator<Item = Settings> {
    [(Order::FarWarp, Copies::Late), (Order::Shuffled, Copies::AtOnce)].into_iter().map(settings)
}

fn settings((order, copies): (Order, Copies)) -> Settings {
    Settings { order, copies, seed: 7 }
}

fn device(settings: Settings) -> Emulated {
    Emulated { settings, multiprocessors: SMALL_DEVICE }
}

/// Operands on the host, row-major without padding.
struct Problem {
    rows: usize,
    outputs: usize,
    inputs: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Problem {
    /// `number` makes the values, which are rounded to BF16 (the bias is not).
    fn new(
        rows: usize,
        outputs: usize,
        inputs: usize,
        biased: bool,
        mut number: impl FnMut() -> f32,
    ) -> Problem {
        let mut matrix = |rows: usize| -> Vec<f32> {
            (0..rows * inputs).map(|_| f32::from(bf16::from_f32(number()))).collect()
        };
        let (x, weight) = (matrix(rows), matrix(outputs));
        let bias = biased.then(|| (0..outputs).map(|_| number()).collect());
        Problem { rows, outputs, inputs, x, weight, bias }
    }

    fn random(rows: usize, outputs: usize, inputs: usize, biased: bool) -> Problem {
        let mut numbers = Numbers((rows + 1000 * outputs + 1_000_000 * inputs) as u64);
        Problem::new(rows, outputs, inputs, biased, || numbers.f32())
    }

    /// Whole numbers whose products and sums are exact, so that the order of summation does not matter at all.
    fn of_integers(rows: usize, outputs: usize, inputs: usize, biased: bool) -> Problem {
        assert!(inputs < 1 << 16, "sums of products of up to 64 stay below 2^24");
        let mut numbers = Numbers(3);
        Problem::new(rows, outputs, inputs, biased, || numbers.below(17) as f32 - 8.0)
    }

    /// The same problem with other rows of x: `order` names the old row of each new one.
    fn with_rows(&self, order: &[usize]) -> Problem {
        let rows = order.iter().flat_map(|&row| self.row(row)).copied().collect();
        Problem { rows: order.len(), x: rows, weight: self.weight.clone(), bias: self.bias.clone(), ..*self }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.x[row * self.inputs..][..self.inputs]
    }

    fn plan(&self, multiprocessors: u32, invariance: Invariance) -> Plan {
        Plan::new(multiprocessors as usize, self.outputs, self.inputs, self.rows, invariance)
    }

    /// Multiplies into poison, in a workspace just as large as is needed, and looks after what the kernels leave.
    fn run(&self, device: &Emulated, invariance: Invariance) -> Vec<f32> {
        let x = padded(&self.x, self.rows, self.inputs);
        let weight = padded(&self.weight, self.outputs, self.inputs);
        let bias = self.bias.as_deref().map(Memory::from_slice);
        let needed = self.plan(device.multiprocessors, invariance).workspace_len();
        let mut partials = Memory::poisoned(needed.partials);
        let mut arrivals = Memory::from_slice(&vec![0; needed.arrivals]);
        let mut y = Memory::poisoned(self.rows * self.outputs);
        linear(
            device,
            device_slice(&x),
            WeightView { values: device_slice(&weight), outputs: self.outputs, inputs: self.inputs },
            bias.as_ref().map(device_slice),
            device_slice_mut(&mut y),
            &mut Workspace {
                partials: device_slice_mut(&mut partials),
                arrivals: device_slice_mut(&mut arrivals),
            },
            invariance,
        )
        .unwrap();
        partials.to_vec();
        assert!(arrivals.to_vec().iter().all(|&arrived| arrived == 0), "arrivals are zero again");
        y.to_vec()
    }

    /// Each sum in f64, and the sum of magnitudes.
    fn reference(&self) -> impl Iterator<Item = (f64, f64)> {
        (0..self.rows).flat_map(move |row| {
            (0..self.outputs).map(move |output| {
                let weight = &self.weight[output * self.inputs..][..self.inputs];
                let products = self.row(row).iter().zip(weight).map(|(&x, &w)| f64::from(x) * f64::from(w));
                let bias = self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[output]));
                products
                    .chain([bias])
                    .fold((0.0, 0.0), |(sum, magnitude), term| (sum + term, magnitude + term.abs()))
            })
        })
    }

    /// Products are exact in f32. A sum passes at most 16 additions inside a multiplication and one for each 16 inputs,
    /// then those of up to 8 warps, 16 splits and a bias; each errs by 2^-24 of the magnitudes at most, or 2^-23
    /// where a tensor core cuts instead of rounding.
    fn assert_close(&self, got: &[f32], context: &str) {
        let additions = 16 + self.inputs / 16 + 8 + 16 + 1;
        let relative = additions as f64 * 2f64.powi(-23);
        assert_eq!(got.len(), self.rows * self.outputs);
        for (at, (&got, (expected, magnitude))) in got.iter().zip(self.reference()).enumerate() {
            let error = (f64::from(got) - expected).abs();
            assert!(
                error <= relative * magnitude,
                "{context}, {self}, element {at}: {got}, expected {expected}, error {error}"
            );
        }
    }

    fn assert_exact(&self, got: &[f32], context: &str) {
        let expected: Vec<f32> = self.reference().map(|(sum, _)| sum as f32).collect();
        assert_same_bits(got, &expected, &format!("{context}, {self}"));
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} rows, {} outputs, {} inputs", self.rows, self.outputs, self.inputs)
    }
}

/// A matrix as kernels want it: BF16, rows on 16 bytes, zeros between.
fn padded(values: &[f32], rows: usize, width: usize) -> Memory<bf16> {
    let stride = row_stride(width);
    let mut all = vec![bf16::ZERO; rows * stride];
    if width > 0 {
        for (to, from) in all.chunks_exact_mut(stride).zip(values.chunks_exact(width)) {
            to.iter_mut().zip(from).for_each(|(to, &from)| *to = bf16::from_f32(from));
        }
    }
    Memory::from_slice(&all)
}

/// (rows, outputs, inputs) of the GEMV: one of each; ragged in all; one split or several; one warp to eight.
const GEMV_SHAPES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (1, 16, 128),
    (8, 17, 136),
    (3, 33, 250),
    (5, 15, 8),
    (2, 40, 1024),
    (8, 7, 2100),
    (1, 200, 600),
    (7, 130, 1032),
];

#[test]
fn emulator_gemv_adds_every_product_once_in_every_way() {
    for (rows, outputs, inputs) in GEMV_SHAPES {
        let problem = Problem::of_integers(rows, outputs, inputs, outputs % 2 == 1);
        for device in Emulated::every_way() {
            problem.assert_exact(&problem.run(&device, Invariance::None), &format!("{:?}", device.settings));
        }
    }
    let splits: Vec<usize> = GEMV_SHAPES
        .map(|(rows, outputs, inputs)| {
            let plan = Plan::new(SMALL_DEVICE as usize, outputs, inputs, rows, Invariance::None);
            assert_eq!(plan.tile.kernel, "linear_gemv");
            plan.splits
        })
        .to_vec();
    assert_eq!(splits, [1, 1, 1, 1, 1, 2, 4, 1, 1], "some are split, some are not");
}

/// (rows, outputs, inputs) of each GEMM class: small ones, for all ways.
const GEMM_SHAPES: [(usize, usize, usize); 10] = [
    (9, 1, 1),
    (16, 65, 72),
    (13, 3, 520),
    (17, 64, 64),
    (32, 70, 129),
    (27, 8, 513),
    (33, 5, 200),
    (65, 9, 8),
    // Stages are taken again, and a sum is split, where tiles are large.
    (65, 9, 330),
    (33, 5, 520),
];

#[test]
fn emulator_gemm_adds_every_product_once_in_every_way() {
    for (rows, outputs, inputs) in GEMM_SHAPES {
        let problem = Problem::of_integers(rows, outputs, inputs, outputs % 2 == 1);
        for device in Emulated::every_way() {
            problem.assert_exact(&problem.run(&device, Invariance::None), &format!("{:?}", device.settings));
        }
    }
}

#[test]
fn emulator_gemm_of_a_few_rows_adds_every_product_once_in_every_way() {
    for (rows, outputs, inputs) in [(1, 1, 1), (8, 64, 64), (3, 66, 600), (5, 4, 300)] {
        let problem = Problem::of_integers(rows, outputs, inputs, outputs % 2 == 0);
        for device in Emulated::every_way() {
            assert_eq!(problem.plan(SMALL_DEVICE, Invariance::Batch).tile.kernel, "linear_gemm_8");
            problem.assert_exact(&problem.run(&device, Invariance::Batch), &format!("{:?}", device.settings));
        }
    }
}

#[test]
fn emulator_largest_tiles_with_ragged_edges_add_every_product_once() {
    // More steps than stages, one or several tiles in both directions, splits where the grid is small.
    for (rows, outputs, inputs) in [(64, 130, 330), (128, 128, 256), (130, 140, 200), (100, 20, 1030)] {
        let problem = Problem::of_integers(rows, outputs, inputs, true);
        for settings in hard_ways() {
            problem.assert_exact(&problem.run(&device(settings), Invariance::None), &format!("{settings:?}"));
        }
    }
}

#[test]
fn emulator_sums_are_within_the_rounding_of_their_additions() {
    let shapes =
        [(1, 48, 2000), (8, 20, 4096), (16, 70, 1100), (32, 64, 576), (50, 20, 2048), (129, 30, 520)];
    for (rows, outputs, inputs) in shapes {
        for biased in [false, true] {
            let problem = Problem::random(rows, outputs, inputs, biased);
            for invariance in [Invariance::None, Invariance::Batch] {
                let settings = settings((Order::Shuffled, Copies::Late));
                problem.assert_close(&problem.run(&device(settings), invariance), &format!("{invariance:?}"));
            }
        }
    }
}

#[test]
fn emulator_gemv_gives_a_row_the_same_bits_among_one_to_eight() {
    for (outputs, inputs) in [(20, 2100), (65, 300)] {
        let all = Problem::random(8, outputs, inputs, true);
        let device = device(Settings::PLAIN);
        let bits = all.run(&device, Invariance::None);
        for rows in 1..8 {
            // The first rows, and the same in another place.
            for first in [0, 8 - rows] {
                let order: Vec<usize> = (first..first + rows).collect();
                let some = all.with_rows(&order).run(&device, Invariance::None);
                assert_same_bits(&some, &bits[first * outputs..][..rows * outputs], &format!("{rows} rows"));
            }
        }
    }
}

#[test]
fn emulator_batch_invariant_rows_have_the_same_bits_in_every_company_place_and_device() {
    // Several splits; ragged outputs and inputs.
    let (outputs, inputs) = (70, 1100);
    let alone = Problem::random(1, outputs, inputs, true);
    let expected = alone.run(&device(Settings::PLAIN), Invariance::Batch);
    let mut numbers = Numbers(11);
    let (mut at_once, mut one_by_one) = (0, 0);
    for rows in [1, 2, 8, 9, 16, 17, 33, 64, 128, 130, 200] {
        let mut problem = Problem::random(rows, outputs, inputs, true);
        problem.weight.clone_from(&alone.weight);
        problem.bias.clone_from(&alone.bias);
        let places = [0, rows - 1, numbers.below(rows)];
        for place in places {
            problem.x[place * inputs..][..inputs].copy_from_slice(&alone.x);
        }
        for multiprocessors in [1, 24] {
            let plan = problem.plan(multiprocessors, Invariance::Batch);
            assert_eq!(plan.splits, 4);
            *if plan.at_once { &mut at_once } else { &mut one_by_one } += 1;
            let device = Emulated { settings: settings((Order::FarWarp, Copies::ByChance)), multiprocessors };
            let y = problem.run(&device, Invariance::Batch);
            for place in places {
                let context = format!("row {place} of {rows}, {multiprocessors} multiprocessors");
                assert_same_bits(&y[place * outputs..][..outputs], &expected, &context);
            }
        }
    }
    assert!(at_once > 5 && one_by_one > 2, "both kinds of splits: {at_once}, {one_by_one}");
}

#[test]
fn emulator_rows_of_the_default_mode_are_the_same_in_every_way_to_run() {
    for rows in [3, 20] {
        let problem = Problem::random(rows, 40, 1500, false);
        assert!(problem.plan(SMALL_DEVICE, Invariance::None).at_once);
        let expected = problem.run(&device(Settings::PLAIN), Invariance::None);
        for device in Emulated::every_way() {
            let context = format!("{:?}", device.settings);
            assert_same_bits(&problem.run(&device, Invariance::None), &expected, &context);
        }
    }
}

#[test]
fn emulator_nothing_to_sum_gives_the_bias_and_nothing_to_write_is_legal() {
    for invariance in [Invariance::None, Invariance::Batch] {
        for rows in [1, 9, 130] {
            for biased in [false, true] {
                let problem = Problem::of_integers(rows, 19, 0, biased);
                problem.assert_exact(&problem.run(&device(Settings::PLAIN), invariance), "no inputs");
            }
        }
        for (rows, outputs, inputs) in [(0, 5, 7), (4, 0, 7), (0, 0, 0)] {
            let problem = Problem::of_integers(rows, outputs, inputs, true);
            let plan = WorkspaceLen::default();
            assert_eq!(workspace_len(SMALL_DEVICE, outputs, inputs, 0, invariance), Ok(plan));
            let (x, weight) = (padded(&problem.x, rows, inputs), padded(&problem.weight, outputs, inputs));
            let mut workspace = (Memory::poisoned(0), Memory::poisoned(0));
            linear(
                &device(Settings::PLAIN),
                device_slice(&x),
                WeightView { values: device_slice(&weight), outputs, inputs },
                None,
                device_slice_mut(&mut Memory::poisoned(0)),
                &mut Workspace {
                    partials: device_slice_mut(&mut workspace.0),
                    arrivals: device_slice_mut(&mut workspace.1),
                },
                invariance,
            )
            .unwrap();
        }
    }
}

#[test]
fn emulator_one_workspace_serves_launches_of_all_shapes_in_turn() {
    let mut needed = WorkspaceLen::default();
    let shapes = [(2, 40, 1024), (20, 40, 1500), (70, 30, 1100), (8, 7, 2100)];
    for (_, outputs, inputs) in shapes {
        for invariance in [Invariance::None, Invariance::Batch] {
            needed = needed.max(workspace_len(SMALL_DEVICE, outputs, inputs, 70, invariance).unwrap());
        }
    }
    let mut partials = Memory::poisoned(needed.partials);
    let mut arrivals = Memory::from_slice(&vec![0; needed.arrivals]);
    for (rows, outputs, inputs) in shapes {
        let problem = Problem::of_integers(rows, outputs, inputs, false);
        let (x, weight) = (padded(&problem.x, rows, inputs), padded(&problem.weight, outputs, inputs));
        for invariance in [Invariance::None, Invariance::Batch] {
            let mut y = Memory::poisoned(rows * outputs);
            linear(
                &device(settings((Order::Shuffled, Copies::Late))),
                device_slice(&x),
                WeightView { values: device_slice(&weight), outputs, inputs },
                None,
                device_slice_mut(&mut y),
                &mut Workspace {
                    partials: device_slice_mut(&mut partials),
                    arrivals: device_slice_mut(&mut arrivals),
                },
                invariance,
            )
            .unwrap();
            problem.assert_exact(&y.to_vec(), "one workspace");
        }
    }
}

/// Launches nothing.
struct NoDevice;

impl Launcher for NoDevice {
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        panic!("{} must not be launched", launch.kernel)
    }

    fn multiprocessors(&self) -> u32 {
        132
    }
}

/// Calls with views of nothing: what is refused is not touched.
fn refusal(x: (u64, usize), weight: (usize, usize, usize), bias: Option<usize>, y: usize) -> String {
    // SAFETY: nobody reads or writes them, since nothing is launched.
    let (x, values, bias, y, partials, arrivals) = unsafe {
        (
            DeviceSlice::new(x.0, x.1),
            DeviceSlice::new(4096, weight.0),
            bias.map(|len| DeviceSlice::new(4096, len)),
            DeviceSliceMut::new(4096, y),
            DeviceSliceMut::new(4096, 100),
            DeviceSliceMut::new(4096, 3),
        )
    };
    let weight = WeightView { values, outputs: weight.1, inputs: weight.2 };
    let workspace = &mut Workspace { partials, arrivals };
    linear(&NoDevice, x, weight, bias, y, workspace, Invariance::None).unwrap_err().to_string()
}

#[test]
fn refusals_say_what_does_not_fit() {
    let matrix = (10 * 16, 10, 12);
    assert_eq!(refusal((0, 32), (159, 10, 12), None, 20), "linear: weight holds 159 elements, 160 expected");
    assert_eq!(refusal((0, 32), matrix, None, 21), "linear: y holds 21 elements, 20 expected");
    assert_eq!(refusal((0, 24), matrix, None, 20), "linear: x holds 24 elements, 32 expected");
    assert_eq!(refusal((0, 32), matrix, Some(9), 20), "linear: bias holds 9 elements, 10 expected");
    assert_eq!(refusal((0, 0), (0, 0, 12), None, 1), "linear: y holds 1 elements, 0 expected");
    assert_eq!(refusal((8, 32), matrix, None, 20), "linear: x at 0x8 does not start on 16 bytes");
    assert_eq!(
        refusal((0, 2 * 4096), (160 * 4096, 160, 4096), None, 320),
        "linear: the workspace holds 100 partial sums and 3 arrivals, this shape needs 10240 and 10; \
         workspace_len says how much to take"
    );
    let huge = refusal((0, 1), (1, 1, usize::MAX), None, 1);
    assert!(huge.contains("at most 1073741824 outputs and rows and 16777216 inputs"), "{huge}");
    assert!(workspace_len(132, usize::MAX, 1, 1, Invariance::Batch).is_err());
}
