//! Plans and results of any shape.

use consort_actors::{
    Epoch, SequenceId, Step,
    plan::{
        BlockCopy, CachedTokens, NewSequence, Output, Sampled, Span, SpanOutput, StepPlan, StepResult,
        TokenLogprobs, Tokens,
    },
};
use consort_kernels::sampling::{Adjustments, SamplingParams};
use consort_parallel::ids::{BlockId, HostBlock};
use proptest::{collection::vec, option, prelude::*};

/// A step that does nothing.
pub(crate) fn empty_plan() -> StepPlan {
    StepPlan {
        epoch: Epoch(1),
        step: Step(0),
        begin: Vec::new(),
        run: Vec::new(),
        copies: Vec::new(),
        saves: Vec::new(),
        loads: Vec::new(),
        await_transfers: false,
        end: Vec::new(),
    }
}

/// Any number but NaN, which is not equal to itself.
fn number() -> impl Strategy<Value = f32> {
    any::<f32>().prop_filter("a number", |value| !value.is_nan())
}

fn sequence() -> impl Strategy<Value = SequenceId> {
    any::<u64>().prop_map(SequenceId)
}

fn block() -> impl Strategy<Value = BlockId> {
    any::<u32>().prop_map(BlockId)
}

fn host() -> impl Strategy<Value = HostBlock> {
    any::<u32>().prop_map(HostBlock)
}

fn adjustments() -> impl Strategy<Value = Adjustments> {
    let lists = (vec(any::<u32>(), 0..4), vec((any::<u32>(), number()), 0..4));
    (any::<u32>(), lists, number(), number(), number()).prop_map(
        |(min_tokens, (masked_until_min, logit_bias), repetition, frequency, presence)| Adjustments {
            min_tokens,
            masked_until_min,
            logit_bias,
            repetition_penalty: repetition,
            frequency_penalty: frequency,
            presence_penalty: presence,
        },
    )
}

fn sampling() -> impl Strategy<Value = SamplingParams> {
    let top_k = option::of(any::<u32>());
    (number(), top_k, number(), number(), any::<u64>(), adjustments()).prop_map(
        |(temperature, top_k, top_p, min_p, seed, adjustments)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            adjustments,
        },
    )
}

fn new_sequence() -> impl Strategy<Value = NewSequence> {
    (sequence(), any::<usize>(), sampling(), option::of(any::<u32>())).prop_map(
        |(sequence, prompt_len, sampling, logprobs)| NewSequence { sequence, prompt_len, sampling, logprobs },
    )
}

fn output() -> impl Strategy<Value = Output> {
    let prompt = (any::<u32>(), option::of(any::<u32>()), any::<bool>());
    prop_oneof![
        Just(Output::Nothing),
        Just(Output::Sample),
        prompt.prop_map(|(top, next, sample)| Output::PromptLogprobs { top, next, sample }),
    ]
}

fn span() -> impl Strategy<Value = Span> {
    let cached = (vec(any::<u32>(), 0..20), vec(option::of(block()), 0..4));
    let tokens = prop_oneof![Just(Tokens::LastSampled), vec(any::<u32>(), 0..40).prop_map(Tokens::Given)];
    (sequence(), cached, tokens, vec(block(), 0..4), output()).prop_map(
        |(sequence, (cached, pages), tokens, new_blocks, output)| Span {
            sequence,
            cached: CachedTokens { tokens: cached, pages },
            tokens,
            new_blocks,
            output,
        },
    )
}

pub(crate) fn plan() -> impl Strategy<Value = StepPlan> {
    let numbers = (any::<u64>(), any::<u64>());
    let copies = vec((block(), block()).prop_map(|(from, to)| BlockCopy { from, to }), 0..3);
    let moves = (vec((block(), host()), 0..3), vec((host(), block()), 0..3), any::<bool>());
    let sequences = (vec(new_sequence(), 0..3), vec(span(), 0..5), vec(sequence(), 0..3));
    (numbers, sequences, copies, moves).prop_map(
        |((epoch, step), (begin, run, end), copies, (saves, loads, await_transfers))| StepPlan {
            epoch: Epoch(epoch),
            step: Step(step),
            begin,
            run,
            copies,
            saves,
            loads,
            await_transfers,
            end,
        },
    )
}

fn logprobs() -> impl Strategy<Value = TokenLogprobs> {
    (any::<u32>(), number(), vec((any::<u32>(), number()), 0..4))
        .prop_map(|(token, logprob, top)| TokenLogprobs { token, logprob, top })
}

fn span_output() -> impl Strategy<Value = SpanOutput> {
    let sampled = (any::<u32>(), option::of(logprobs()));
    let sampled = sampled.prop_map(|(token, logprobs)| Sampled { token, logprobs });
    (sequence(), vec(sampled, 0..3), vec(logprobs(), 0..3), any::<bool>()).prop_map(
        |(sequence, sampled, prompt_logprobs, broken)| SpanOutput {
            sequence,
            sampled,
            prompt_logprobs,
            broken,
        },
    )
}

pub(crate) fn result() -> impl Strategy<Value = StepResult> {
    let numbers = (any::<u64>(), any::<u64>(), option::of(any::<u64>()), any::<u64>());
    (numbers, vec(span_output(), 0..5)).prop_map(|((epoch, step, transferred, digest), outputs)| StepResult {
        epoch: Epoch(epoch),
        step: Step(step),
        outputs,
        transferred: transferred.map(Step),
        digest,
    })
}
