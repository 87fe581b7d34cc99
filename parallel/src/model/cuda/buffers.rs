//! What a rank's steps read and write besides weights and pages.

use consort_kernels::{
    KernelError,
    all_reduce::cuda::AREA_WORDS,
    cuda::{
        device::{DeviceBuffer, Reservation},
        row_stride,
    },
    element::bf16,
    linear::cuda::{Workspace, WorkspaceLen},
    sampling::cuda as sampling,
};

use super::{
    arenas::{Arenas, Plans},
    numbers::StepNumbers,
    shape::{LOGIT_ROWS_MAX, RankShape},
};

/// Changes of logits of one group of rows at most; a row alone may need as many as there are tokens.
const LOGIT_CHANGES_MIN: usize = 1 << 16;

/// Declares the buffers once: as they are planned, and as they are placed. `met` are those that other ranks touch.
macro_rules! buffers {
    (@of $all:ident) => { $all.own };
    (@of $all:ident met) => { $all.met() };
    ($($(#[$doc:meta])* $name:ident: $element:ty, $what:literal $(, $met:ident)?;)*) => {
        /// The buffers before there is memory for them.
        pub(super) struct BufferPlan {
            $($name: Reservation<$element>,)*
        }

        /// The buffers of one rank, sized for the largest step.
        pub(super) struct Buffers {
            $($(#[$doc])* pub(super) $name: DeviceBuffer<$element>,)*
        }

        impl BufferPlan {
            fn reserve(plans: &mut Plans, lengths: &Lengths) -> BufferPlan {
                BufferPlan { $($name: buffers!(@of plans $($met)?).reserve(lengths.$name, $what),)* }
            }

            /// The same in the arenas.
            pub(super) fn place(self, arenas: &Arenas) -> Buffers {
                Buffers { $($name: buffers!(@of arenas $($met)?).buffer(self.$name),)* }
            }
        }

        /// Elements of each buffer.
        struct Lengths {
            $($name: usize,)*
        }
    };
}

buffers! {
    /// A step's numbers, see [`super::numbers`].
    numbers: u32, "numbers of a step";
    /// One for each pair of dimensions.
    frequencies: f32, "rope frequencies";
    /// `[rows, pairs]`.
    cos: f32, "rope cosines";
    /// `[rows, pairs]`.
    sin: f32, "rope sines";
    /// `[rows, hidden]`: the residual stream.
    residual: f32, "residual";
    /// `[rows, hidden]`: the sum over ranks of what a layer adds to it.
    delta: f32, "delta";
    /// `[rows, row_stride(hidden)]`: normalised input of a layer.
    normed: bf16, "normed";
    /// `[rows, (query + 2 · KV heads) · head]`.
    qkv: f32, "qkv";
    /// `[rows, query heads, padded head]`, after rotation.
    queries: bf16, "queries";
    /// `[rows, row_stride(query heads · head)]`.
    attended: bf16, "attended";
    /// `[rows, 2 · columns]`.
    gate_up: f32, "gate and up";
    /// `[rows, row_stride(columns)]`.
    activated: bf16, "activated";
    /// Partial sums of attention.
    attention_sums: f32, "partial sums of attention";
    /// Scratch of products: partial sums, and blocks that have come.
    products: f32, "partial sums of products";
    arrivals: u32, "arrivals of blocks";
    /// What this rank adds to a sum over ranks, or its part of the logits: read by all ranks.
    exchange: f32, "what ranks exchange", met;
    /// What ranks tell each other of it.
    area: u32, "the ranks' meeting place", met;
    /// `[rows, row_stride(hidden)]`: normalised hidden states of the output rows.
    kept: bf16, "kept hidden states";
    /// `[logit rows, vocabulary]`.
    logits: f32, "logits";
    /// How rows are drawn, and their changes of logits.
    draw_rows: u32, "how rows are drawn";
    draw_entries: u32, "changes of logits";
    /// Logits before they were changed.
    before: f32, "logits before changes";
    standings: u32, "standings of rows";
    /// The drawn tokens, of all output rows of a step.
    tokens: u32, "drawn tokens";
    draw_scratch: u32, "scratch of sampling";
    /// Rows whose log-probabilities are wanted, and what is made of them.
    wanted: u32, "rows with log-probabilities";
    chosen: u32, "tokens with log-probabilities";
    summary_scratch: u32, "scratch of log-probabilities";
    summaries: u32, "log-probabilities";
}

impl BufferPlan {
    /// Reserves what `shape` needs, with `scratch` for its products.
    pub(super) fn new(
        plans: &mut Plans,
        shape: &RankShape,
        scratch: WorkspaceLen,
    ) -> Result<BufferPlan, KernelError> {
        let (rows, hidden, logit_rows) = (shape.rows_max, shape.hidden, LOGIT_ROWS_MAX);
        let (pages, qkv) = (shape.attention.pages, shape.qkv());
        let angles = rows * shape.frequencies.len();
        let changes = changes_max(shape.vocabulary);
        let ranks = shape.ranks();
        let lengths = Lengths {
            numbers: StepNumbers::room(shape),
            frequencies: shape.frequencies.len(),
            cos: angles,
            sin: angles,
            residual: rows * hidden,
            delta: if ranks > 1 { rows * hidden } else { 0 },
            normed: rows * row_stride(hidden),
            qkv: rows * qkv.columns(),
            queries: rows * qkv.query_elements(),
            attended: rows * row_stride(shape.query_heads * pages.head_dim()),
            gate_up: rows * 2 * shape.columns,
            activated: rows * row_stride(shape.columns),
            attention_sums: shape.attention_floats()?,
            products: scratch.partials,
            arrivals: scratch.arrivals,
            exchange: (rows * hidden).max(logit_rows * shape.widest_vocabulary()),
            area: AREA_WORDS,
            kept: rows * row_stride(hidden),
            logits: logit_rows * shape.vocabulary,
            draw_rows: logit_rows * sampling::ROW_WORDS,
            draw_entries: changes * sampling::ENTRY_WORDS,
            before: changes,
            standings: sampling::standing_words(logit_rows),
            tokens: rows.max(logit_rows),
            draw_scratch: sampling::Workspace::words(logit_rows),
            wanted: 2 * logit_rows,
            chosen: logit_rows,
            summary_scratch: sampling::summary_scratch_words(logit_rows, shape.vocabulary, sampling::TOP_MAX),
            summaries: logit_rows * sampling::Summary::words(sampling::TOP_MAX),
        };
        Ok(BufferPlan::reserve(plans, &lengths))
    }
}

/// Changes of logits that one group of rows may ask for.
pub(super) fn changes_max(vocabulary: usize) -> usize {
    // A row may change every token, once for each kind of change.
    (3 * vocabulary).max(LOGIT_CHANGES_MIN)
}

/// Scratch memory of products.
pub(super) fn scratch<'a>(
    products: &'a mut DeviceBuffer<f32>,
    arrivals: &'a mut DeviceBuffer<u32>,
) -> Workspace<'a> {
    Workspace { partials: products.all_mut(), arrivals: arrivals.all_mut() }
}
