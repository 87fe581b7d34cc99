//! What the commands tell people: one line per rank, sizes, speeds, and errors with their causes.

use std::{fmt::Write as _, io::ErrorKind, time::Duration};

use consort_actors::{RankStatus, ReplicaId, Status};

use crate::engine::{Compute, Usage};

/// One line for each rank of these replicas; where there are several, each with its replica's number.
pub(super) fn rank_lines<'a>(
    replicas: impl ExactSizeIterator<Item = (ReplicaId, &'a [RankStatus])>,
) -> Vec<String> {
    let several = replicas.len() > 1;
    let lines = replicas.flat_map(|(replica, ranks)| {
        let name = if several { format!("{replica}, ") } else { String::new() };
        ranks.iter().map(move |rank| format!("{name}{}", rank_line(rank)))
    });
    lines.collect()
}

/// The same of a running ensemble.
pub(super) fn ensemble_lines(status: &Status) -> Vec<String> {
    rank_lines(status.replicas.iter().map(|replica| (replica.replica, replica.ranks.as_slice())))
}

/// `rank 0: query heads 0..3, KV heads 0..1, weights 89.7 MB, 1024 KV blocks`.
pub(super) fn rank_line(rank: &RankStatus) -> String {
    format!(
        "rank {}: query heads {}..{}, KV heads {}..{}, weights {}, {} KV blocks ({})",
        rank.rank.0,
        rank.query_heads.start,
        rank.query_heads.end,
        rank.kv_heads.start,
        rank.kv_heads.end,
        size(rank.weight_bytes),
        rank.kv_blocks,
        size(rank.kv_bytes),
    )
}

/// `bfloat16 on amx, 2 threads for each rank`.
pub(super) fn compute_line(compute: Compute) -> String {
    let Compute { on_cpus, dtype, isa, threads_per_rank } = compute;
    if !on_cpus {
        return format!("{dtype} on CUDA");
    }
    let noun = if threads_per_rank == 1 { "thread" } else { "threads" };
    format!("{dtype} on {isa}, {threads_per_rank} {noun} for each rank")
}

/// Bytes in decimal units, as data sheets give them.
pub(super) fn size(bytes: u64) -> String {
    const UNITS: [(f64, &str); 3] = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let value = bytes as f64;
    match UNITS.iter().find(|(unit, _)| value >= *unit) {
        Some((unit, name)) => format!("{:.1} {name}", value / unit),
        None => format!("{bytes} B"),
    }
}

/// Time to the first token and the speed after it, from `tokens` tokens between two moments after the start.
pub(super) fn speed(tokens: usize, first: Duration, last: Duration) -> String {
    let mut text = format!("{tokens} tokens, first after {:.2} s", first.as_secs_f64());
    let decode = last.saturating_sub(first).as_secs_f64();
    if tokens > 1 && decode > 0.0 {
        let _ = write!(text, ", then {:.1} tokens/s", (tokens - 1) as f64 / decode);
    }
    text
}

/// The moments of one run.
pub(super) struct Timing {
    /// From the start to a model that takes requests.
    pub(super) loaded: Duration,
    /// From the start to the question.
    pub(super) asked: Duration,
    /// From the question to the first token.
    pub(super) first: Duration,
    /// From the question to the last token.
    pub(super) last: Duration,
}

/// What a run took, as its user waits for it (from the start) and as a server's user would (from the question).
pub(super) fn summary(usage: Usage, timing: &Timing) -> String {
    format!(
        "loaded in {:.2} s; first token {:.2} s after start; {}; {}",
        timing.loaded.as_secs_f64(),
        (timing.asked + timing.first).as_secs_f64(),
        prompt(usage),
        speed(usage.completion_tokens, timing.first, timing.last),
    )
}

/// `prompt 39 tokens`, and how many of them were cached if any were.
fn prompt(usage: Usage) -> String {
    match usage.cached_tokens {
        0 => format!("prompt {} tokens", usage.prompt_tokens),
        cached => format!("prompt {} tokens, {cached} of them cached", usage.prompt_tokens),
    }
}

/// An error and its causes, each once.
pub(super) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    let mut last = String::new();
    for cause in error.chain() {
        let message = cause.to_string();
        // Transparent errors repeat their source.
        if message == last {
            continue;
        }
        let _ = if text.is_empty() {
            write!(text, "error: {message}")
        } else {
            write!(text, "\n  caused by: {message}")
        };
        last = message;
    }
    text
}

/// Whether the reader of our output has gone, which is no failure of ours.
pub(super) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|error| error.kind() == ErrorKind::BrokenPipe)
}
