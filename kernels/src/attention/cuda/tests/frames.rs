//! Plans whose launches stay the same while sequences grow.
use std::cell::RefCell;

use super::*;
use crate::cuda::Launch;

/// Room for five sequences around three.
const SEQUENCES: usize = 5;

/// Remembers launches as text, and runs them.
struct Recorder {
    device: Emulated,
    launches: RefCell<Vec<String>>,
}

impl Launcher for Recorder {
    #[allow(unsafe_code)]
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), KernelError> {
        self.launches.borrow_mut().push(format!("{launch:?}"));
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(launch) }
    }

    fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors
    }
}

/// What is on the device: a step overwrites the numbers and queries in place.
struct Placed {
    frame: Frame,
    queries: Memory<bf16>,
    pages: Memory<bf16>,
    numbers: Memory<u32>,
    sinks: Memory<f32>,
    workspace: Memory<f32>,
    out: Memory<bf16>,
}

impl Placed {
    fn new(world: &World, frame: Frame) -> Placed {
        let (heads, padded) = (world.heads(), world.shape.pages.padded_dim());
        let floats = frame.partials * heads * (padded + 2);
        Placed {
            frame,
            queries: Memory::poisoned(SEQUENCES * heads * padded),
            pages: Memory::from_slice(&world.pages),
            numbers: Memory::poisoned(frame.numbers_room(&world.shape)),
            sinks: Memory::from_slice(world.sinks.as_ref().unwrap()),
            workspace: Memory::poisoned(floats),
            out: Memory::poisoned(SEQUENCES * row_stride(world.width())),
        }
    }

    /// Decodes `spans` and returns their rows; asserts that those beyond are left alone.
    fn step(
        &mut self,
        world: &World,
        device: &dyn Launcher,
        spans: &[PagedSpan],
        queries: &[f32],
    ) -> Vec<f32> {
        let page_count = world.pages.len() / world.shape.pages.page_elements();
        let plan = Plan::framed(&world.shape, self.frame, spans, &world.tables, page_count).unwrap();
        let (dim, padded) = (world.shape.pages.head_dim(), world.shape.pages.padded_dim());
        let mut wide = vec![bf16::NAN; self.queries.len()];
        for (to, from) in wide.chunks_exact_mut(padded).zip(queries.chunks_exact(dim)) {
            to.fill(bf16::ZERO);
            to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16::from_f32(*x));
        }
        self.queries.write(&wide);
        let mut numbers = vec![u32::MAX; self.numbers.len()];
        numbers[..plan.numbers().len()].copy_from_slice(plan.numbers());
        self.numbers.write(&numbers);
        let inputs = Inputs {
            shape: &world.shape,
            queries: device_slice(&self.queries),
            pages: device_slice(&self.pages),
            sinks: Some(device_slice(&self.sinks)),
            plan: &plan,
            numbers: device_slice(&self.numbers),
        };
        let (workspace, out) = (device_slice_mut(&mut self.workspace), device_slice_mut(&mut self.out));
        attention(device, &inputs, workspace, out).unwrap();
        let (out, stride) = (self.out.to_vec(), row_stride(world.width()));
        let (rows, beyond) = out.split_at(spans.len() * stride);
        assert!(beyond.iter().all(|x| x.is_nan()), "rows beyond the step's");
        rows.chunks_exact(stride).flat_map(|row| row[..world.width()].iter().map(|x| x.to_f32())).collect()
    }
}

/// Every sequence as it was some tokens ago.
fn earlier(spans: &[PagedSpan], tokens: usize) -> Vec<PagedSpan> {
    spans.iter().map(|span| PagedSpan { context_len: span.context_len - tokens, ..span.clone() }).collect()
}

#[test]
fn emulator_framed_decodes_have_the_bits_of_exact_ones_and_launches_that_stay_the_same() {
    for (window, chunks) in [(0, FILL), (0, fixed(64)), (70, fixed(64)), (7, FILL)] {
        let case = case(&[3, 4], 64, &[(200, 1), (21, 1), (130, 1)]).sinks().window(window);
        let world = World::new(&case);
        let contexts = world.spans.iter().map(|span| span.context_len);
        let table_len = world.tables.len() + 3;
        let frame = Frame::around(&world.shape, chunks, contexts, SEQUENCES, 1000, table_len).unwrap();
        for device in two_ways() {
            let mut placed = Placed::new(&world, frame);
            let device = Recorder { device, launches: RefCell::default() };
            let mut launches = Vec::new();
            for tokens in [0, 20, 3] {
                let spans = earlier(&world.spans, tokens);
                let got = placed.step(&world, &device, &spans, &world.queries);
                let exact = world.attend(&device.device, fixed(frame.chunk), &spans, &world.queries);
                assert_same_bits(&got, &exact, &format!("window {window} {chunks:?}, {tokens} tokens ago"));
                launches.push(device.launches.take());
            }
            let two = world.spans[..2].to_vec();
            placed.out = Memory::poisoned(placed.out.len());
            placed.step(&world, &device, &two, &world.queries[..2 * world.width()]);
            assert_eq!(launches[0], launches[1]);
            assert_eq!(launches[0], launches[2]);
            assert_eq!(launches[0].len(), device.launches.take().len());
        }
    }
}

#[test]
fn frames_refuse_what_they_have_no_room_for() {
    let world = World::new(&case(&[2], 64, &[(200, 1), (130, 1)]));
    let frame = Frame { sequences: 2, chunk: 64, chunks: 4, partials: 7, table_len: world.tables.len() };
    let plan = |frame: Frame, spans: &[PagedSpan]| {
        Plan::framed(&world.shape, frame, spans, &world.tables, 100).map(|plan| plan.numbers().len())
    };
    assert!(plan(frame, &world.spans).is_ok_and(|numbers| numbers <= frame.numbers_room(&world.shape)));
    for frame in [
        Frame { sequences: 1, ..frame },
        Frame { chunk: 96, ..frame },
        Frame { chunk: 0, ..frame },
        Frame { chunks: 3, ..frame },
        Frame { partials: 6, ..frame },
        Frame { table_len: frame.table_len - 1, ..frame },
    ] {
        assert!(plan(frame, &world.spans).is_err(), "{frame:?}");
    }
    let prefill = PagedSpan { rows: 0..2, ..world.spans[0].clone() };
    assert!(plan(frame, &[prefill]).is_err(), "two rows of one sequence");
}

#[test]
fn frames_are_few_while_a_conversation_grows_and_have_room_for_what_they_are_around() {
    let world = World::new(&case(&[8], 128, &[(1, 1)]));
    for chunks in [Chunks::Fill { multiprocessors: 132 }, fixed(512)] {
        let mut frames = std::collections::BTreeSet::new();
        for context in 1..=40_000usize {
            let contexts = [context, context / 3 + 1];
            let frame =
                Frame::around(&world.shape, chunks, contexts.into_iter(), 2, 1 << 17, 10_000).unwrap();
            let needed: usize = contexts.iter().map(|context| context.div_ceil(frame.chunk)).sum();
            assert!(
                frame.chunks * frame.chunk >= context && frame.partials >= needed,
                "{context}: {frame:?}"
            );
            frames.insert(frame);
        }
        assert!(frames.len() <= 16, "{chunks:?}: {}", frames.len());
    }
}
