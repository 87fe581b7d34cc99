//! Keys whose value is one of a few words.

use consort_kernels::device::Isa;

use super::super::{
    AllReduce, DType, DeviceSpec, Isolation,
    error::Violations,
    excerpt::shown,
    raw::{Leaf, RawParallel},
    suggest,
};

const DTYPES: [&str; 3] = ["bfloat16", "float32", "auto"];
/// Other names of the same formats.
const DTYPE_ALIASES: [(&str, &str); 6] = [
    ("bf16", "bfloat16"),
    ("bfp16", "bfloat16"),
    ("f32", "float32"),
    ("fp32", "float32"),
    ("single", "float32"),
    ("full", "float32"),
];

/// How the names of formats begin that exist and are not computed in; nobody misspelt them.
const OTHER_FORMATS: [&str; 9] = ["float8", "fp8", "f8", "float64", "fp64", "f64", "double", "float4", "fp4"];

/// The number format. `float` is vLLM's other name of `float32`.
pub(super) fn dtype(leaf: &Leaf<String>, violations: &mut Violations) -> DType {
    let Some(given) = leaf else { return DType::default() };
    match given.value.as_str() {
        "bfloat16" => return DType::BFloat16,
        "float32" | "float" => return DType::Float32,
        "auto" => return DType::Auto,
        _ => {}
    }
    let name = shown(&given.value);
    let (problem, remedy) = match given.value.trim().to_lowercase().as_str() {
        "float16" | "half" | "fp16" | "f16" => (
            format!("\"{name}\" is not computed in by this version"),
            "use \"bfloat16\": float16 checkpoints are read too, and rounded to it".to_owned(),
        ),
        other if OTHER_FORMATS.iter().any(|format| other.starts_with(format)) => (
            format!("\"{name}\" is not computed in by this version"),
            "use \"bfloat16\", or \"float32\" for the most exact".to_owned(),
        ),
        other => (
            format!("\"{name}\" is no dtype of this version"),
            suggest::for_word(other, &DTYPES, &DTYPE_ALIASES),
        ),
    };
    violations.add("model.dtype", &given.origin, problem, remedy);
    DType::default()
}

const ISOLATIONS: [&str; 2] = ["thread", "process"];
const ISOLATION_ALIASES: [(&str, &str); 6] = [
    ("threads", "thread"),
    ("none", "thread"),
    ("processes", "process"),
    ("mp", "process"),
    ("multiprocessing", "process"),
    ("fork", "process"),
];

/// What separates ranks. `isolates_gpus`: whether those on GPUs are processes where nobody says.
pub(super) fn isolation(
    leaf: &Leaf<String>,
    isolates_gpus: bool,
    devices: &[DeviceSpec],
    violations: &mut Violations,
) -> Isolation {
    const KEY: &str = "parallel.isolation";
    let Some(given) = leaf else {
        let is_process = isolates_gpus && !devices.iter().any(DeviceSpec::is_cpu);
        return if is_process { Isolation::Process } else { Isolation::default() };
    };
    let name = given.value.trim().to_lowercase();
    match name.as_str() {
        "thread" => Isolation::Thread,
        "process" => Isolation::Process,
        _ => {
            let problem = format!("\"{}\" separates no ranks", shown(&given.value));
            let remedy = suggest::for_word(&name, &ISOLATIONS, &ISOLATION_ALIASES);
            violations.add(KEY, &given.origin, problem, remedy);
            Isolation::default()
        }
    }
}

const ALL_REDUCE_ALIASES: [(&str, &str); 5] = [
    ("default", "auto"),
    ("custom", "kernels"),
    ("kernel", "kernels"),
    ("one_shot", "kernels"),
    ("two_shots", "kernels"),
];

/// What ranks on GPUs sum with. NCCL promises no order of sums, which `batch_invariant` asks for.
pub(super) fn all_reduce(
    parallel: &RawParallel,
    devices: &[DeviceSpec],
    violations: &mut Violations,
) -> AllReduce {
    const KEY: &str = "parallel.all_reduce";
    let Some(given) = &parallel.all_reduce else { return AllReduce::default() };
    let name = given.value.trim().to_lowercase();
    let Some(means) = AllReduce::ALL.into_iter().find(|means| means.name() == name) else {
        let problem = format!("\"{}\" is nothing that ranks sum with", shown(&given.value));
        let remedy = suggest::for_word(&name, &AllReduce::ALL.map(AllReduce::name), &ALL_REDUCE_ALIASES);
        violations.add(KEY, &given.origin, problem, remedy);
        return AllReduce::default();
    };
    let invariant = parallel.batch_invariant.as_ref().filter(|invariant| invariant.value);
    if let (AllReduce::Nccl, Some(invariant), false) =
        (means, invariant, devices.iter().all(DeviceSpec::is_cpu))
    {
        let problem = "NCCL's sums have no fixed order, so tokens would depend on their company".to_owned();
        let remedy = "use \"auto\" or \"kernels\", or leave batch_invariant off".to_owned();
        let note = (&invariant.origin, "this asks for tokens that do not".to_owned());
        violations.add_clash((KEY, &given.origin), problem, remedy, note);
        return AllReduce::default();
    }
    means
}

/// The instruction set that is forced, if one is.
pub(super) fn cpu_isa(leaf: &Leaf<String>, violations: &mut Violations) -> Option<Isa> {
    let given = leaf.as_ref()?;
    let available: Vec<Isa> = Isa::available().collect();
    match chosen(&given.value, &available) {
        Ok(isa) => isa,
        Err((problem, remedy)) => {
            violations.add("parallel.cpu_isa", &given.origin, problem, remedy);
            None
        }
    }
}

/// The instruction set of that name, on a machine that has these; `auto` leaves the choice to the machine.
pub(in crate::topology) fn chosen(name: &str, available: &[Isa]) -> Result<Option<Isa>, (String, String)> {
    let name = name.trim();
    if name.eq_ignore_ascii_case("auto") {
        return Ok(None);
    }
    match name.parse::<Isa>() {
        Ok(isa) if available.contains(&isa) => Ok(Some(isa)),
        Ok(isa) => {
            let has: Vec<&str> = available.iter().map(|isa| isa.name()).collect();
            Err((
                format!("this machine has no {isa}"),
                format!("use \"auto\", or what it has: {}", has.join(", ")),
            ))
        }
        Err(_) => {
            let words: Vec<&str> = std::iter::once("auto").chain(Isa::ALL.map(Isa::name)).collect();
            let aliases =
                [("avx512f", "avx512"), ("avx-512", "avx512"), ("fma", "avx2"), ("none", "portable")];
            let remedy = suggest::for_word(name, &words, &aliases);
            Err((format!("\"{}\" is no instruction set", shown(name)), remedy))
        }
    }
}
