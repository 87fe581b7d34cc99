//! From kept rows to tokens and log-probabilities, all on the device: only those come to the host.

use std::{ops::Range, time::Duration};

use consort_kernels::{
    KernelError,
    cuda::{
        Launcher,
        device::{CudaDevice, DeviceBuffer},
    },
    sampling::{
        SamplingParams, TokenHistory,
        cuda::{
            self as sampling, Batch, NO_TOKEN, Requests, Slice, Standings, Summary, TOP_MAX, Wanted,
            Workspace,
        },
    },
};

use super::{
    super::{Drawn, ModelError, RowOutcome, RowRequest, TokenLogprobs},
    buffers::{Buffers, changes_max},
    shape::{LOGIT_ROWS_MAX, RankShape},
};

/// A group of rows whose logits are on the device.
pub(super) struct Rows<'a> {
    pub(super) device: &'a CudaDevice,
    pub(super) shape: &'a RankShape,
    pub(super) buffers: &'a mut Buffers,
    /// Whether log-probabilities are wanted at all.
    pub(super) report: bool,
    /// Longest wait for the device.
    pub(super) limit: Duration,
}

/// Row of the logits, its token where it is known already, and how many best ones to report.
#[derive(Clone, Copy)]
struct Report {
    row: usize,
    token: Option<u32>,
    top: u32,
}

/// How the rows of one group are drawn, as the device reads it. Rows that draw nothing are greedy ones, whose token
/// nobody looks at.
pub(super) struct Group {
    pub(super) rows: Range<usize>,
    batch: Batch,
}

/// Cuts rows into groups for which there is room.
pub(super) fn groups(requests: &[RowRequest<'_>], vocabulary: usize) -> Result<Vec<Group>, ModelError> {
    let (nobody, nothing) =
        (SamplingParams { temperature: 0.0, ..SamplingParams::default() }, TokenHistory::default());
    let changes_max = changes_max(vocabulary);
    let mut groups: Vec<Group> = Vec::new();
    for (at, request) in requests.iter().enumerate() {
        let (sampling, history, position) =
            request.draw.map_or((&nobody, &nothing, 0), |draw| (draw.sampling, draw.history, draw.position));
        let changes = Batch::changes_of(sampling, history);
        if changes > changes_max {
            return Err(ModelError::Batch(format!("{changes} changes of logits in one row")));
        }
        let has_room = |group: &Group| {
            group.rows.len() < LOGIT_ROWS_MAX && group.batch.shape().entries + changes <= changes_max
        };
        if !groups.last().is_some_and(has_room) {
            groups.push(Group { rows: at..at, batch: Batch::new() });
        }
        if let Some(group) = groups.last_mut() {
            group.batch.push(sampling, history, position);
            group.rows.end = at + 1;
        }
    }
    Ok(groups)
}

impl Rows<'_> {
    /// Outcomes of a group's rows, whose logits are the first ones.
    pub(super) fn outcomes(
        &mut self,
        group: &Group,
        requests: &[RowRequest<'_>],
    ) -> Result<Vec<RowOutcome>, ModelError> {
        let mut outcomes = vec![RowOutcome::default(); requests.len()];
        let prompts: Vec<Report> = reports(requests, self.report, |request| {
            request.prompt.map(|prompt| (Some(prompt.token), prompt.top))
        });
        for (report, logprobs) in prompts.iter().zip(self.summaries(&prompts, None, &[])?) {
            outcomes[report.row].prompt = Some(logprobs);
        }
        if requests.iter().all(|request| request.draw.is_none()) {
            return Ok(outcomes);
        }
        let drawn: Vec<Report> = reports(requests, self.report, |request| {
            request.draw.and_then(|draw| draw.logprobs).map(|top| (None, top))
        });
        self.draw(&group.batch, 0, !drawn.is_empty())?;
        let mut tokens = vec![0; requests.len()];
        self.device.download(self.buffers.tokens.slice(0..tokens.len()), &mut tokens, self.limit)?;
        let known: Vec<Report> = drawn
            .into_iter()
            .filter(|report| tokens[report.row] != NO_TOKEN)
            .map(|report| Report { token: Some(tokens[report.row]), ..report })
            .collect();
        let mut summaries = known.iter().zip(self.summaries(&known, Some(&group.batch), &tokens)?).peekable();
        for (row, (request, outcome)) in requests.iter().zip(&mut outcomes).enumerate() {
            if request.draw.is_some() {
                let token = (tokens[row] != NO_TOKEN).then_some(tokens[row]);
                let logprobs =
                    summaries.next_if(|(report, _)| report.row == row).map(|(_, logprobs)| logprobs);
                outcome.drawn = Some(Drawn { token, logprobs });
            }
        }
        Ok(outcomes)
    }

    /// Draws a token for each row of a group and leaves it on the device, where the group's rows are among the step's.
    pub(super) fn draw_in_place(&mut self, group: &Group) -> Result<(), KernelError> {
        self.draw(&group.batch, group.rows.start, false)
    }

    /// Changes the logits and draws a token for each row, which are left from the place `first` on. `restores`: whether
    /// what the logits were is kept.
    fn draw(&mut self, batch: &Batch, first: usize, restores: bool) -> Result<(), KernelError> {
        let (launcher, b): (&dyn Launcher, _) = (self.device, &mut *self.buffers);
        let shape = batch.shape();
        let (words, entries) = (batch.row_words().len(), batch.entry_words().len());
        self.device.upload(batch.row_words(), b.draw_rows.slice_mut(0..words))?;
        self.device.upload(batch.entry_words(), b.draw_entries.slice_mut(0..entries))?;
        let requests = on_device(batch, &b.draw_rows, &b.draw_entries, self.shape.vocabulary);
        let logits = shape.rows * self.shape.vocabulary;
        let places = first..first + shape.rows;
        let standings = 0..sampling::standing_words(shape.rows);
        let mut workspace = Workspace::new(b.draw_scratch.all_mut(), LOGIT_ROWS_MAX)?;
        let before = if restores { Some(b.before.slice_mut(0..shape.entries)) } else { None };
        sampling::survey(
            launcher,
            requests,
            b.logits.slice_mut(0..logits),
            before,
            &mut workspace,
            b.standings.slice_mut(standings.clone()),
            Some(b.tokens.slice_mut(places.clone())),
        )?;
        let found = Standings { words: b.standings.slice(standings), ranks: 1 };
        if shape.filters {
            sampling::select(launcher, requests, b.logits.slice(0..logits), found, &mut workspace)?;
        }
        if shape.draws {
            let tokens = b.tokens.slice_mut(places);
            sampling::draw(launcher, requests, b.logits.slice(0..logits), found, &mut workspace, tokens)?;
        }
        Ok(())
    }

    /// Log-probabilities of raw logits. `changed`: the batch whose survey changed them; `tokens`: of every row, as far
    /// as they are known.
    fn summaries(
        &mut self,
        reports: &[Report],
        changed: Option<&Batch>,
        tokens: &[u32],
    ) -> Result<Vec<TokenLogprobs>, ModelError> {
        let Some(rows) = reports.iter().map(|report| report.row + 1).max() else { return Ok(Vec::new()) };
        let rows = rows.max(tokens.len());
        let top_max = reports.iter().map(|report| report.top as usize).max().unwrap_or(0);
        if top_max > TOP_MAX {
            return Err(ModelError::Batch(format!(
                "{top_max} best tokens; at most {TOP_MAX} can be reported"
            )));
        }
        let mut chosen = tokens.to_vec();
        chosen.resize(rows, NO_TOKEN);
        for Report { row, token, .. } in reports {
            chosen[*row] = token.unwrap_or(NO_TOKEN);
        }
        let pairs: Vec<u32> = reports.iter().flat_map(|report| [report.row as u32, report.top]).collect();
        let words = Summary::words(top_max);
        let mut found = vec![0; reports.len() * words];
        {
            let (device, b) = (self.device, &mut *self.buffers);
            device.upload(&chosen, b.chosen.slice_mut(0..rows))?;
            device.upload(&pairs, b.wanted.slice_mut(0..pairs.len()))?;
            let slice = Slice { first: 0, width: self.shape.vocabulary };
            let changed = changed.map(|batch| {
                let requests = on_device(batch, &b.draw_rows, &b.draw_entries, slice.width);
                (requests, b.before.slice(0..batch.shape().entries))
            });
            let wanted = Wanted {
                rows: b.wanted.slice(0..pairs.len()),
                tokens: b.chosen.slice(0..rows),
                changed,
                top_max,
            };
            let scratch = sampling::summary_scratch_words(reports.len(), slice.width, top_max);
            sampling::summarize(
                device,
                wanted,
                slice,
                b.logits.slice_mut(0..rows * slice.width),
                b.summary_scratch.slice_mut(0..scratch),
                &mut Workspace::new(b.draw_scratch.all_mut(), LOGIT_ROWS_MAX)?,
                b.summaries.slice_mut(0..found.len()),
            )?;
            device.download(b.summaries.slice(0..found.len()), &mut found, self.limit)?;
        }
        let outcomes = reports.iter().zip(found.chunks_exact(words)).map(|(report, words)| {
            let (logprob, top) = Summary::from_words(words).log_probabilities(report.top as usize);
            TokenLogprobs { token: report.token.unwrap_or(NO_TOKEN), logprob, top }
        });
        Ok(outcomes.collect())
    }
}

/// A batch that was copied to the device.
fn on_device<'a>(
    batch: &Batch,
    rows: &'a DeviceBuffer<u32>,
    entries: &'a DeviceBuffer<u32>,
    vocabulary: usize,
) -> Requests<'a> {
    Requests {
        shape: batch.shape(),
        rows: rows.slice(0..batch.row_words().len()),
        entries: entries.slice(0..batch.entry_words().len()),
        slice: Slice { first: 0, width: vocabulary },
    }
}

fn reports(
    requests: &[RowRequest<'_>],
    report: bool,
    wanted: impl Fn(&RowRequest<'_>) -> Option<(Option<u32>, u32)>,
) -> Vec<Report> {
    let all = requests.iter().enumerate().filter(|_| report);
    all.filter_map(|(row, request)| wanted(request).map(|(token, top)| Report { row, token, top })).collect()
}
