//! What goes wrong on purpose: which error the driver gives, whether ours has the right type, and what works after it.
//!
//! Each fault has a process of its own, since some end a context. The same programs run over the software driver in
//! tests; what another driver does differently is a row that misses its goal, with its words in the note.
#![allow(unsafe_code)]

use std::{
    env,
    io::Write,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use consort_kernels::{
    KernelError,
    all_reduce::cuda::{AREA_WORDS, PeerAddresses, Peers, all_reduce_one_shot},
    cuda::{
        Args, DeviceSlice, DeviceSliceMut, Launch, Launcher,
        device::{ArenaPlan, CudaDevice, CudaError, HostWords, Selector},
        settings::Settings,
    },
};

use crate::{
    figures::{Figure, Goal, Row},
    session::{Session, WORK_LIMIT},
};

/// Names the fault to a process that makes it.
const FAULT: &str = "CONSORT_DEVICE_CHECK_FAULT";
/// Longest time of one.
const FAULT_LIMIT: Duration = Duration::from_secs(8);
/// What a process says before what it found.
const FOUND: &str = "found: ";

/// An address at which nothing is.
const NOWHERE: u64 = 16;

struct Fault {
    name: &'static str,
    make: fn(Arc<CudaDevice>) -> Result<String>,
}

/// Each returns what was found, which begins with "as expected" where it was.
const FAULTS: &[Fault] = &[
    Fault { name: "more memory than there is", make: too_much_memory },
    Fault { name: "more shared memory than a block may have", make: too_much_shared_memory },
    Fault { name: "more threads than a block may have", make: too_many_threads },
    Fault { name: "arguments of another kernel", make: wrong_arguments },
    Fault { name: "a copy to the host while launches are recorded", make: copy_in_a_recording },
    Fault { name: "a read where nothing is", make: illegal_address },
    Fault { name: "a device opened anew after that", make: opened_anew },
    Fault { name: "a kernel that waits for nobody", make: endless_kernel },
];

/// Makes a fault, where this process was started for one.
pub(crate) fn make() -> Option<Result<()>> {
    let name = env::var(FAULT).ok()?;
    Some(make_named(&name))
}

fn make_named(name: &str) -> Result<()> {
    let fault = FAULTS.iter().find(|fault| fault.name == name).context("no such fault")?;
    let device = open()?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{FOUND}{}", (fault.make)(device)?.replace('\n', " "))?;
    Ok(())
}

fn open() -> Result<Arc<CudaDevice>> {
    Ok(CudaDevice::open(&"cuda:0".parse::<Selector>()?, &Settings::of_process())?)
}

pub(crate) fn run(session: &mut Session) -> Result<()> {
    for fault in FAULTS {
        let found = in_a_process(fault).unwrap_or_else(|error| format!("{error:#}"));
        let expected = if found.starts_with("as expected") { 1.0 } else { 0.0 };
        let row = Row::new(fault.name, Figure::rate(expected, "as expected"));
        session.row(row.goal(Goal::hoped(1.0, "the software driver")).note(found))?;
    }
    Ok(())
}

/// What a process found that made the fault.
fn in_a_process(fault: &Fault) -> Result<String> {
    let mut command = Command::new(env::current_exe()?);
    // The same part again, whose rows are nobody's.
    command.args(env::args_os().skip(1)).env(FAULT, fault.name);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).process_group(0);
    let mut child = command.spawn().context("cannot start a process")?;
    let started = Instant::now();
    while child.try_wait()?.is_none() {
        if started.elapsed() > FAULT_LIMIT {
            // It may have ended this very moment.
            let _ = child.kill();
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let found = said.lines().find_map(|line| line.strip_prefix(FOUND));
    match found {
        Some(found) if output.status.success() => Ok(found.to_owned()),
        Some(found) => bail!("{found}; then the process ended with {}", output.status),
        None => bail!("the process ended with {} and had found nothing", output.status),
    }
}

/// The text of an error that `expected` recognises, or of another one.
fn judged<T>(outcome: Result<T, KernelError>, expected: impl Fn(&CudaError) -> bool) -> String {
    match outcome {
        Ok(_) => "no error".to_owned(),
        Err(KernelError::Cuda(error)) if expected(&error) => format!("as expected: {error}"),
        Err(error) => format!("another error: {error}"),
    }
}

/// The same, if the device still works.
fn and_goes_on(device: &Arc<CudaDevice>, found: String) -> String {
    match works(device) {
        Ok(()) => found,
        Err(error) => format!("{error}, after: {found}"),
    }
}

/// Copies there and back.
fn works(device: &Arc<CudaDevice>) -> Result<(), KernelError> {
    let mut plan = ArenaPlan::new();
    let reserved = plan.reserve::<u32>(4, "numbers");
    let mut buffer = plan.allocate(device)?.buffer(reserved);
    let mut got = [0u32; 4];
    device.upload(&[1, 2, 3, 4], buffer.all_mut())?;
    device.download(buffer.all(), &mut got, WORK_LIMIT)?;
    if got == [1, 2, 3, 4] {
        return Ok(());
    }
    let reason = format!("1, 2, 3, 4 came back as {got:?}");
    Err(CudaError::Misuse { device: "the device".to_owned(), reason }.into())
}

fn too_much_memory(device: Arc<CudaDevice>) -> Result<String> {
    let (_, total) = device.memory()?;
    let mut plan = ArenaPlan::new();
    plan.reserve::<u32>(usize::try_from(total)? / 2, "twice the memory");
    let outcome = plan.allocate(&device).map_err(KernelError::from);
    let is_expected = |error: &CudaError| match error {
        CudaError::OutOfMemory { wanted: Some(wanted), free: Some(free), .. } => wanted > free,
        _ => false,
    };
    Ok(and_goes_on(&device, judged(outcome, is_expected)))
}

/// A launch of `embedding_bf16` for one row of eight columns, at these addresses.
fn launch_embedding(
    device: &Arc<CudaDevice>,
    [tokens, table, out]: [u64; 3],
    threads: u32,
    shared_bytes: u32,
) -> Result<(), KernelError> {
    // SAFETY: the addresses are what is tried out; nothing is written to them but by a kernel that fails.
    let (tokens, table, mut out) = unsafe {
        (
            DeviceSlice::<u32>::new(tokens, 1),
            DeviceSlice::<u32>::new(table, 4),
            DeviceSliceMut::<f32>::new(out, 8),
        )
    };
    let args = Args::new().slice(tokens).slice(tokens).u32(0).slice(table).u32(1).u32(8).u32(0);
    let args = args.slice_mut(&mut out).u32(1).u32(8);
    let launch = Launch { kernel: "embedding_bf16", grid: [1; 3], threads, shared_bytes, args };
    // SAFETY: number and sizes of the parameters are the kernel's, which the device checks; for the rest see above.
    unsafe { device.launch(&launch) }
}

/// A refused launch: one that the driver says is invalid, and that costs the device nothing.
fn refused(device: &Arc<CudaDevice>, threads: u32, shared_bytes: u32) -> String {
    let launched = launch_embedding(device, [NOWHERE; 3], threads, shared_bytes);
    let is_expected = |error: &CudaError| matches!(error, CudaError::Call { function: "cuLaunchKernel", .. });
    and_goes_on(device, judged(launched, is_expected))
}

fn too_much_shared_memory(device: Arc<CudaDevice>) -> Result<String> {
    Ok(refused(&device, 128, 1 << 20))
}

fn too_many_threads(device: Arc<CudaDevice>) -> Result<String> {
    Ok(refused(&device, 2048, 0))
}

fn wrong_arguments(device: Arc<CudaDevice>) -> Result<String> {
    let launch = Launch {
        kernel: "embedding_bf16",
        grid: [1; 3],
        threads: 128,
        shared_bytes: 0,
        args: Args::new().u32(1),
    };
    // SAFETY: the device refuses it, since its parameters are not the kernel's.
    let launched = unsafe { device.launch(&launch) };
    Ok(and_goes_on(&device, judged(launched, |error| matches!(error, CudaError::Misuse { .. }))))
}

fn copy_in_a_recording(device: Arc<CudaDevice>) -> Result<String> {
    let mut plan = ArenaPlan::new();
    let reserved = plan.reserve::<u32>(4, "numbers");
    let buffer = plan.allocate(&device)?.buffer(reserved);
    let mut got = [7u32; 4];
    let recorded = device.capture(|_| device.download(buffer.all(), &mut got, WORK_LIMIT));
    let found = judged(recorded, |error| matches!(error, CudaError::Call { code: 900, .. }));
    Ok(and_goes_on(&device, found))
}

fn illegal_address(device: Arc<CudaDevice>) -> Result<String> {
    let outcome = fail_at_an_address(&device);
    let lost = matches!(&outcome, Err(KernelError::Cuda(error)) if error.is_lost());
    let found = judged(outcome, |error| matches!(error, CudaError::Lost { code: 700, .. }));
    // What is lost stays lost, and says so.
    match (lost, works(&device)) {
        (true, Err(KernelError::Cuda(error))) if error.is_lost() => Ok(found),
        (_, later) => Ok(format!("afterwards {later:?}, after: {found}")),
    }
}

fn fail_at_an_address(device: &Arc<CudaDevice>) -> Result<(), KernelError> {
    launch_embedding(device, [NOWHERE; 3], 128, 0)?;
    Ok(device.synchronize("end a kernel that fails", WORK_LIMIT)?)
}

/// Whether a process can go on with a device whose context it has lost, once nothing of that is left.
fn opened_anew(device: Arc<CudaDevice>) -> Result<String> {
    let failed = fail_at_an_address(&device);
    drop(device);
    let again = open().and_then(|device| Ok(works(&device)?));
    Ok(match (failed, again) {
        (Err(_), Ok(())) => "as expected: it works".to_owned(),
        (Err(_), Err(error)) => format!("the process must end: {error:#}"),
        (Ok(()), _) => "the kernel did not fail".to_owned(),
    })
}

/// An all-reduce of a rank whose peer never comes: the wait for it ends, and so does the process.
fn endless_kernel(device: Arc<CudaDevice>) -> Result<String> {
    let mut plan = ArenaPlan::new();
    let (area, buffer) =
        (plan.reserve::<u32>(2 * AREA_WORDS, "areas"), plan.reserve::<f32>(2 * 256, "buffers"));
    let out = plan.reserve::<f32>(256, "sums");
    let arena = plan.allocate(&device)?;
    let (area, buffer, mut out) = (arena.buffer(area), arena.buffer(buffer), arena.buffer(out));
    let abort = HostWords::new(&device, 1)?;
    let peers: Vec<PeerAddresses> = (0..2u64)
        .map(|rank| PeerAddresses {
            buffer: buffer.address() + rank * 1024,
            area: area.address() + rank * (AREA_WORDS * 4) as u64,
        })
        .collect();
    // SAFETY: both ranks' memory is here and stays; the other rank never launches anything.
    let peers = unsafe { Peers::new(0, &peers, 256, abort.address(0), device.multiprocessors())? };
    device.load_all()?;
    all_reduce_one_shot(&*device, &peers.with_polls_max(u32::MAX), out.all_mut())?;
    let waited =
        device.synchronize("end what waits for nobody", Duration::from_secs(1)).map_err(KernelError::from);
    let found = judged(waited, |error| matches!(error, CudaError::Timeout { .. }));
    // The abort word ends the kernel: what a rank does for one whose peer is gone.
    abort.set(0, 1);
    match device.synchronize("end after an abort", WORK_LIMIT) {
        Ok(()) => Ok(found),
        Err(error) => Ok(format!("the abort did not end it: {error}, after: {found}")),
    }
}
