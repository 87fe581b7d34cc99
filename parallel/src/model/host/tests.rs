use consort_kernels::{
    DType,
    device::Device,
    kv_append::PageShape,
    sampling::{Adjustments, SamplingParams, TokenHistory, log_probabilities},
};

use super::*;
use crate::{
    collective::{Local, LocalGroup},
    kv::KvLayout,
    model::PromptToken,
};

const VOCAB: usize = 40;
const ROWS_MAX: usize = 3;
/// An output row of this number breaks down.
const BROKEN: usize = 5;

/// Row `r` of its logits is a function of `r`; counts the rows of each call.
#[derive(Default)]
struct RowModel {
    logits: Vec<f32>,
    calls: Vec<Range<usize>>,
}

fn logits_of(row: usize) -> Vec<f32> {
    if row == BROKEN {
        return vec![f32::NAN; VOCAB];
    }
    (0..VOCAB).map(|id| ((row * 31 + id * 17) % 23) as f32 / 4.0).collect()
}

impl HostModel for RowModel {
    fn forward(&mut self, batch: &Batch, _: &mut KvStore, _: &mut dyn Collective) -> Result<(), ModelError> {
        if batch.tokens.is_empty() { Err(ModelError::Batch("no tokens".into())) } else { Ok(()) }
    }

    fn logits(&mut self, rows: Range<usize>, _: &mut dyn Collective) -> Result<&mut [f32], ModelError> {
        self.calls.push(rows.clone());
        self.logits = rows.flat_map(logits_of).collect();
        Ok(&mut self.logits)
    }

    fn logit_rows_max(&self) -> usize {
        ROWS_MAX
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn weight_bytes(&self) -> u64 {
        0
    }

    fn workspace_bytes(&self) -> u64 {
        0
    }
}

/// A model whose last forward kept `rows` rows.
fn after_forward(rows: usize) -> (DrawOnHost<RowModel>, KvStore, Local) {
    let layout =
        KvLayout { pages: PageShape::new(16, 1, 16).unwrap(), layers_per_page: 1, dtype: DType::F32 };
    let mut kv = KvStore::new(&Device::cpu(1).unwrap(), layout, 1).unwrap();
    let (mut model, mut comm) = (DrawOnHost::new(RowModel::default()), LocalGroup::new(1).remove(0));
    let batch = Batch { tokens: vec![0; rows], output_rows: (0..rows).collect(), ..Batch::default() };
    model.forward(&batch, &mut kv, &mut comm).unwrap();
    (model, kv, comm)
}

fn sampling() -> SamplingParams {
    let adjustments = Adjustments { logit_bias: vec![(7, 50.0)], ..Adjustments::default() };
    SamplingParams { temperature: 0.0, adjustments, ..SamplingParams::default() }
}

#[test]
fn every_row_is_answered_in_order_across_groups_of_logits() {
    let (mut model, _kv, mut comm) = after_forward(8);
    let (sampling, history) = (sampling(), TokenHistory::default());
    let draw = Draw { sampling: &sampling, history: &history, position: 3, logprobs: Some(2) };
    // A row of each kind, over and over: nothing, prompt, draw, both.
    let request = |row: usize| RowRequest {
        prompt: (row % 2 == 1).then_some(PromptToken { token: 9, top: 1 }),
        draw: (row % 4 > 1).then_some(draw),
    };
    let requests: Vec<_> = (0..8).map(request).collect();
    let outcomes = model.outcomes(&requests, true, &mut comm).unwrap();
    assert_eq!(model.model.calls, [0..3, 3..6, 6..8]);
    for (row, (outcome, request)) in outcomes.iter().zip(&requests).enumerate() {
        let raw = logits_of(row);
        let prompt = request.prompt.map(|_| TokenLogprobs::of(&raw, 9, 1));
        assert_eq!(outcome.prompt, prompt, "row {row}");
        // The bias decides what is drawn, and does not show in what is reported.
        let (logprob, top) = log_probabilities(&raw, 7, 2);
        let logprobs = Some(TokenLogprobs { token: 7, logprob, top });
        let drawn = request.draw.map(|_| Drawn { token: Some(7), logprobs });
        assert_eq!(outcome.drawn, drawn, "row {row}");
    }
}

#[test]
fn ranks_that_do_not_report_draw_the_same_and_make_no_log_probabilities() {
    let (mut model, _kv, mut comm) = after_forward(5);
    let (sampling, history) = (SamplingParams { seed: 5, ..Default::default() }, TokenHistory::default());
    let draw = Draw { sampling: &sampling, history: &history, position: 3, logprobs: Some(2) };
    let requests = [RowRequest { prompt: Some(PromptToken { token: 1, top: 1 }), draw: Some(draw) }; 5];
    let reported = model.outcomes(&requests, true, &mut comm).unwrap();
    let silent = model.outcomes(&requests, false, &mut comm).unwrap();
    for (reported, silent) in reported.iter().zip(&silent) {
        let token = reported.drawn.as_ref().and_then(|drawn| drawn.token);
        assert!(token.is_some() && reported.prompt.is_some());
        assert_eq!(*silent, RowOutcome { prompt: None, drawn: Some(Drawn { token, logprobs: None }) });
    }
}

#[test]
fn a_row_without_a_finite_logit_yields_no_token_and_its_neighbours_theirs() {
    let (mut model, _kv, mut comm) = after_forward(BROKEN + 2);
    let (sampling, history) = (sampling(), TokenHistory::default());
    let draw = Draw { sampling: &sampling, history: &history, position: 3, logprobs: Some(2) };
    let requests = [RowRequest { prompt: None, draw: Some(draw) }; BROKEN + 2];
    let outcomes = model.outcomes(&requests, true, &mut comm).unwrap();
    assert_eq!(outcomes[BROKEN].drawn, Some(Drawn { token: None, logprobs: None }));
    assert_eq!(outcomes[BROKEN + 1].drawn.as_ref().and_then(|drawn| drawn.token), Some(7));
}

#[test]
fn rows_that_were_not_kept_have_no_outcome() {
    let (mut model, mut kv, mut comm) = after_forward(2);
    assert!(model.outcomes(&[RowRequest::default(); 1], true, &mut comm).is_err());
    assert!(model.outcomes(&[RowRequest::default(); 3], true, &mut comm).is_err());
    model.outcomes(&[RowRequest::default(); 2], true, &mut comm).unwrap();
    // A forward that fails leaves nothing of the one before.
    model.forward(&Batch::default(), &mut kv, &mut comm).unwrap_err();
    assert!(model.outcomes(&[RowRequest::default(); 2], true, &mut comm).is_err());
}
