use consort_emulator::Memory;

use super::*;
use crate::{
    cuda::{Args, DeviceSlice, DeviceSliceMut, Launch, Launcher},
    linear::cuda::{Invariance, WeightView, Workspace, linear, workspace_len},
    rms_norm::{
        cuda::{Norm, rms_norm},
        rms_norm_reference,
    },
    swiglu::{
        cuda::{Activation, swiglu},
        swiglu_reference,
    },
    testing::{
        assert_same_bits,
        emulated::{Emulated, bf16_rows, device_slice, device_slice_mut},
    },
};

pub(super) const ROWS: usize = 5;
const WIDTH: usize = 72;
const HIDDEN: usize = 40;
const EPS: f32 = 1e-5;

/// What a step reads: a norm, a product and an activation, one after another.
pub(super) struct Given {
    pub(super) residual: Vec<f32>,
    norm: Vec<f32>,
    weight: Vec<f32>,
    weight_rows: Vec<bf16>,
    bias: Vec<f32>,
}

impl Given {
    pub(super) fn new(seed: u64) -> Given {
        let mut numbers = Numbers(seed);
        let (weight, weight_rows) = bf16_rows(&numbers.vec(2 * HIDDEN * WIDTH), WIDTH);
        let (residual, norm, bias) = (numbers.vec(ROWS * WIDTH), numbers.vec(WIDTH), numbers.vec(2 * HIDDEN));
        Given { residual, norm, weight, weight_rows, bias }
    }

    /// The same step over another residual.
    pub(super) fn with_residual_of(self, other: &Given) -> Given {
        Given { residual: other.residual.clone(), ..self }
    }

    /// In f32, but where the step rounds to BF16.
    fn reference(&self) -> Vec<f32> {
        let mut out = Vec::new();
        for row in self.residual.chunks_exact(WIDTH) {
            let normal = rms_norm_reference::<bf16>(&mut row.to_vec(), None, &self.norm, EPS);
            let sums: Vec<f32> = self
                .weight
                .chunks_exact(WIDTH)
                .zip(&self.bias)
                .map(|(weight, bias)| weight.iter().zip(&normal).map(|(a, b)| a * b).sum::<f32>() + bias)
                .collect();
            out.extend(swiglu_reference(&sums[..HIDDEN], &sums[HIDDEN..]));
        }
        out
    }

    /// The step by the emulator alone.
    pub(super) fn emulated(&self, multiprocessors: u32) -> Vec<f32> {
        let settings = Emulated::every_way().next().expect("there is a way").settings;
        let emulated = Emulated { settings, multiprocessors };
        let (mut residual, norm) = (Memory::from_slice(&self.residual), Memory::from_slice(&self.norm));
        let (weight, bias) = (Memory::from_slice(&self.weight_rows), Memory::from_slice(&self.bias));
        let mut normal = Memory::from_slice(&vec![bf16::ZERO; ROWS * row_stride(WIDTH)]);
        let mut gate_up = Memory::from_slice(&[0.0f32; ROWS * 2 * HIDDEN]);
        let mut out = Memory::from_slice(&vec![bf16::ZERO; ROWS * row_stride(HIDDEN)]);
        let len = workspace_len(multiprocessors, 2 * HIDDEN, WIDTH, ROWS, Invariance::None).unwrap();
        let (mut partials, mut arrivals) =
            (Memory::from_slice(&vec![0.0f32; len.partials]), Memory::from_slice(&vec![0u32; len.arrivals]));
        let workspace = Workspace {
            partials: device_slice_mut(&mut partials),
            arrivals: device_slice_mut(&mut arrivals),
        };
        let views = Views {
            residual: device_slice_mut(&mut residual),
            norm: device_slice(&norm),
            weight: device_slice(&weight),
            bias: device_slice(&bias),
            normal: device_slice_mut(&mut normal),
            gate_up: device_slice_mut(&mut gate_up),
            out: device_slice_mut(&mut out),
            workspace,
        };
        views.launch(&emulated).unwrap();
        out.to_vec().iter().map(|x| f32::from(*x)).collect()
    }
}

/// A step's memory on a device.
pub(super) struct Step {
    pub(super) residual: DeviceBuffer<f32>,
    norm: DeviceBuffer<f32>,
    weight: DeviceBuffer<bf16>,
    bias: DeviceBuffer<f32>,
    normal: DeviceBuffer<bf16>,
    gate_up: DeviceBuffer<f32>,
    pub(super) out: DeviceBuffer<bf16>,
    partials: DeviceBuffer<f32>,
    arrivals: DeviceBuffer<u32>,
}

/// What a step's operations are given.
struct Views<'a> {
    residual: DeviceSliceMut<'a, f32>,
    norm: DeviceSlice<'a, f32>,
    weight: DeviceSlice<'a, bf16>,
    bias: DeviceSlice<'a, f32>,
    normal: DeviceSliceMut<'a, bf16>,
    gate_up: DeviceSliceMut<'a, f32>,
    out: DeviceSliceMut<'a, bf16>,
    workspace: Workspace<'a>,
}

impl Views<'_> {
    fn launch(mut self, launcher: &dyn Launcher) -> Result<(), KernelError> {
        let norm = Norm { weight: self.norm, eps: EPS };
        let rows = self.normal.len();
        rms_norm(launcher, self.residual, None, norm, self.normal.range(0..rows))?;
        let weight = WeightView { values: self.weight, outputs: 2 * HIDDEN, inputs: WIDTH };
        let sums = self.gate_up.len();
        let y = self.gate_up.range(0..sums);
        let normal = self.normal.shared();
        linear(launcher, normal, weight, Some(self.bias), y, &mut self.workspace, Invariance::None)?;
        swiglu(launcher, Activation::Silu, self.gate_up.shared(), HIDDEN, self.out)
    }
}

impl Step {
    /// With everything but the residual in place.
    pub(super) fn new(device: &Arc<CudaDevice>, given: &Given) -> Step {
        Step::try_new(device, given).expect("the device works")
    }

    pub(super) fn try_new(device: &Arc<CudaDevice>, given: &Given) -> Result<Step, KernelError> {
        let len = workspace_len(device.multiprocessors(), 2 * HIDDEN, WIDTH, ROWS, Invariance::None)?;
        let mut plan = ArenaPlan::new();
        let residual = plan.reserve(ROWS * WIDTH, "residual");
        let norm = plan.reserve(WIDTH, "norm");
        let weight = plan.reserve(given.weight_rows.len(), "weight");
        let bias = plan.reserve(2 * HIDDEN, "bias");
        let normal = plan.reserve(ROWS * row_stride(WIDTH), "normal");
        let gate_up = plan.reserve(ROWS * 2 * HIDDEN, "gates and ups");
        let out = plan.reserve(ROWS * row_stride(HIDDEN), "out");
        let (partials, arrivals) =
            (plan.reserve(len.partials, "partial sums"), plan.reserve(len.arrivals, "arrivals"));
        let arena = plan.allocate(device)?;
        let mut step = Step {
            residual: arena.buffer(residual),
            norm: arena.buffer(norm),
            weight: arena.buffer(weight),
            bias: arena.buffer(bias),
            normal: arena.buffer(normal),
            gate_up: arena.buffer(gate_up),
            out: arena.buffer(out),
            partials: arena.buffer(partials),
            arrivals: arena.buffer(arrivals),
        };
        device.upload(&given.norm, step.norm.all_mut())?;
        device.upload(&given.weight_rows, step.weight.all_mut())?;
        device.upload(&given.bias, step.bias.all_mut())?;
        Ok(step)
    }

    pub(super) fn launch(&mut self, launcher: &dyn Launcher) -> Result<(), KernelError> {
        let workspace = Workspace { partials: self.partials.all_mut(), arrivals: self.arrivals.all_mut() };
        let views = Views {
            residual: self.residual.all_mut(),
            norm: self.norm.all(),
            weight: self.weight.all(),
            bias: self.bias.all(),
            normal: self.normal.all_mut(),
            gate_up: self.gate_up.all_mut(),
            out: self.out.all_mut(),
            workspace,
        };
        views.launch(launcher)
    }
}

pub(super) fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|x| f32::from(*x)).collect()
}

/// Holds a step's results to the emulator's, bit by bit, and to the plain loops of the CPU: sums of 72 products below 4
/// in another order differ by less than 2^-12, a norm may be rounded to the neighbouring BF16 (2^-8 of products below
/// 4, of which few are, and never all at once), and the result is rounded once more.
pub(super) fn assert_step(got: &[bf16], given: &Given, multiprocessors: u32, context: &str) {
    let got = widened(got);
    assert_same_bits(&got, &given.emulated(multiprocessors), context);
    for (row, (got, expected)) in
        got.chunks_exact(row_stride(HIDDEN)).zip(given.reference().chunks_exact(HIDDEN)).enumerate()
    {
        for (column, (got, expected)) in got.iter().zip(expected).enumerate() {
            let near = (got - expected).abs() <= 0.02 * (1.0 + expected.abs());
            assert!(near, "{context}, row {row}, column {column}: {got}, not {expected}");
        }
    }
}

#[test]
fn software_driver_operations_have_the_emulators_bits_and_the_references_numbers() {
    in_every_order(
        module_path!(),
        "software_driver_operations_have_the_emulators_bits_and_the_references_numbers",
        &[],
        |settings| {
            let device = open(settings, "cuda:0");
            let given = Given::new(1);
            let mut step = Step::new(&device, &given);
            device.upload(&given.residual, step.residual.all_mut()).unwrap();
            step.launch(&*device).unwrap();
            assert_step(&read(&device, &step.out), &given, device.multiprocessors(), "launched");
        },
    );
}

#[test]
fn software_driver_all_kernels_load_and_load_once() {
    let test = "software_driver_all_kernels_load_and_load_once";
    let report = report_of(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        device.load_all().unwrap();
        device.load_all().unwrap();
        let given = Given::new(2);
        let mut step = Step::new(&device, &given);
        step.launch(&*device).unwrap();
        device.synchronize("run a step", LIMIT).unwrap();
    });
    if let Some(report) = report {
        let loads = report.calls["cuModuleLoadData"];
        assert_eq!(loads, crate::cuda::sources::SOURCES.len() as u64);
        assert_eq!((report.violations, report.leaked_bytes(), report.launches), (0, 0, 3));
    }
}

#[test]
#[allow(unsafe_code)]
fn software_driver_a_launch_of_other_parameters_or_of_no_kernel_is_refused() {
    over_driver(
        module_path!(),
        "software_driver_a_launch_of_other_parameters_or_of_no_kernel_is_refused",
        &[],
        |settings| {
            let device = open(settings, "cuda:0");
            let launch = |kernel, args| {
                let launch = Launch { kernel, grid: [1, 1, 1], threads: 32, shared_bytes: 0, args };
                // SAFETY: neither is launched, which is what the test shows.
                unsafe { device.launch(&launch) }.unwrap_err().to_string()
            };
            let error = launch("rms_norm_1", Args::new().u64(0).u32(1));
            assert!(
                error.contains("rms_norm_1 takes parameters of") && error.contains("given [8, 4]"),
                "{error}"
            );
            let error = launch("no_such_kernel", Args::new());
            assert!(error.contains("no text has a kernel of this name"), "{error}");
        },
    );
}
