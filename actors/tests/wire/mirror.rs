//! The types of plans and results once more, for bincode.

use bincode::Encode;
use consort_actors::plan;
use consort_kernels::sampling;

#[derive(Encode)]
pub(crate) struct StepPlan {
    epoch: u64,
    step: u64,
    begin: Vec<NewSequence>,
    run: Vec<Span>,
    copies: Vec<(u32, u32)>,
    saves: Vec<(u32, u32)>,
    loads: Vec<(u32, u32)>,
    await_transfers: bool,
    end: Vec<u64>,
}

#[derive(Encode)]
struct NewSequence {
    sequence: u64,
    prompt_len: u64,
    sampling: SamplingParams,
    logprobs: Option<u32>,
}

#[derive(Encode)]
struct SamplingParams {
    temperature: f32,
    top_k: Option<u32>,
    top_p: f32,
    min_p: f32,
    seed: u64,
    adjustments: Adjustments,
}

#[derive(Encode)]
struct Adjustments {
    min_tokens: u32,
    masked_until_min: Vec<u32>,
    logit_bias: Vec<(u32, f32)>,
    repetition_penalty: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
}

#[derive(Encode)]
struct Span {
    sequence: u64,
    cached: (Vec<u32>, Vec<Option<u32>>),
    tokens: Tokens,
    new_blocks: Vec<u32>,
    output: Output,
}

#[derive(Encode)]
enum Tokens {
    Given(Vec<u32>),
    LastSampled,
}

#[derive(Encode)]
enum Output {
    Nothing,
    Sample,
    PromptLogprobs { top: u32, next: Option<u32>, sample: bool },
}

#[derive(Encode)]
pub(crate) struct StepResult {
    epoch: u64,
    step: u64,
    outputs: Vec<SpanOutput>,
    transferred: Option<u64>,
    digest: u64,
}

#[derive(Encode)]
struct SpanOutput {
    sequence: u64,
    sampled: Vec<(u32, Option<TokenLogprobs>)>,
    prompt_logprobs: Vec<TokenLogprobs>,
    broken: bool,
}

#[derive(Encode)]
struct TokenLogprobs {
    token: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

impl From<&plan::StepPlan> for StepPlan {
    fn from(plan: &plan::StepPlan) -> Self {
        Self {
            epoch: plan.epoch.0,
            step: plan.step.0,
            begin: plan.begin.iter().map(NewSequence::from).collect(),
            run: plan.run.iter().map(Span::from).collect(),
            copies: plan.copies.iter().map(|copy| (copy.from.0, copy.to.0)).collect(),
            saves: plan.saves.iter().map(|(block, host)| (block.0, host.0)).collect(),
            loads: plan.loads.iter().map(|(host, block)| (host.0, block.0)).collect(),
            await_transfers: plan.await_transfers,
            end: plan.end.iter().map(|sequence| sequence.0).collect(),
        }
    }
}

impl From<&plan::NewSequence> for NewSequence {
    fn from(new: &plan::NewSequence) -> Self {
        Self {
            sequence: new.sequence.0,
            prompt_len: new.prompt_len as u64,
            sampling: SamplingParams::from(&new.sampling),
            logprobs: new.logprobs,
        }
    }
}

impl From<&sampling::SamplingParams> for SamplingParams {
    fn from(params: &sampling::SamplingParams) -> Self {
        let adjustments = &params.adjustments;
        Self {
            temperature: params.temperature,
            top_k: params.top_k,
            top_p: params.top_p,
            min_p: params.min_p,
            seed: params.seed,
            adjustments: Adjustments {
                min_tokens: adjustments.min_tokens,
                masked_until_min: adjustments.masked_until_min.clone(),
                logit_bias: adjustments.logit_bias.clone(),
                repetition_penalty: adjustments.repetition_penalty,
                frequency_penalty: adjustments.frequency_penalty,
                presence_penalty: adjustments.presence_penalty,
            },
        }
    }
}

impl From<&plan::Span> for Span {
    fn from(span: &plan::Span) -> Self {
        let pages = span.cached.pages.iter().map(|page| page.map(|page| page.0)).collect();
        Self {
            sequence: span.sequence.0,
            cached: (span.cached.tokens.clone(), pages),
            tokens: match &span.tokens {
                plan::Tokens::Given(given) => Tokens::Given(given.clone()),
                plan::Tokens::LastSampled => Tokens::LastSampled,
            },
            new_blocks: span.new_blocks.iter().map(|block| block.0).collect(),
            output: match span.output {
                plan::Output::Nothing => Output::Nothing,
                plan::Output::Sample => Output::Sample,
                plan::Output::PromptLogprobs { top, next, sample } => {
                    Output::PromptLogprobs { top, next, sample }
                }
            },
        }
    }
}

impl From<&plan::StepResult> for StepResult {
    fn from(result: &plan::StepResult) -> Self {
        Self {
            epoch: result.epoch.0,
            step: result.step.0,
            outputs: result.outputs.iter().map(SpanOutput::from).collect(),
            transferred: result.transferred.map(|step| step.0),
            digest: result.digest,
        }
    }
}

impl From<&plan::SpanOutput> for SpanOutput {
    fn from(output: &plan::SpanOutput) -> Self {
        let sampled = output.sampled.iter();
        Self {
            sequence: output.sequence.0,
            sampled: sampled.map(|one| (one.token, one.logprobs.as_ref().map(TokenLogprobs::from))).collect(),
            prompt_logprobs: output.prompt_logprobs.iter().map(TokenLogprobs::from).collect(),
            broken: output.broken,
        }
    }
}

impl From<&plan::TokenLogprobs> for TokenLogprobs {
    fn from(logprobs: &plan::TokenLogprobs) -> Self {
        Self { token: logprobs.token, logprob: logprobs.logprob, top: logprobs.top.clone() }
    }
}
