use super::*;
use crate::model::drawn_by;

fn good() -> Batch {
    Batch {
        tokens: vec![5, 6, 7],
        positions: vec![16, 17, 0],
        spans: vec![
            BatchSpan { rows: 0..2, context_len: 18, table: 0..2 },
            BatchSpan { rows: 2..3, context_len: 1, table: 2..3 },
        ],
        tables: vec![[3, 1, 2].map(BlockId).to_vec(), [0, 3, 1].map(BlockId).to_vec()],
        output_rows: vec![1, 2],
    }
}

const LIMITS: BatchLimits =
    BatchLimits { max_tokens: 3, vocab_size: 8, groups: 2, block_size: 16, num_blocks: 4, drawn: 0 };

#[test]
fn a_sound_batch_passes() {
    good().check(LIMITS).unwrap();
    Batch::new(2).check(LIMITS).unwrap();
}

#[test]
fn tokens_of_rows_that_draw_pass_and_those_of_others_do_not() {
    let mut batch = good();
    batch.tokens[1] = drawn_by(1);
    batch.check(BatchLimits { drawn: 2, ..LIMITS }).unwrap();
    let refused = batch.check(BatchLimits { drawn: 1, ..LIMITS }).unwrap_err().to_string();
    assert!(refused.contains("a token of row 1, where 1 rows draw any"), "{refused}");
}

#[test]
fn every_planted_fault_is_refused() {
    type Fault = fn(&mut Batch);
    let faults: [(&str, Fault); 17] = [
        ("too many tokens", |b| b.tokens.push(0)),
        ("a missing position", |b| b.positions.truncate(2)),
        ("a token outside the vocabulary", |b| b.tokens[1] = 8),
        ("a token that nobody draws", |b| b.tokens[1] = drawn_by(0)),
        ("positions with a gap", |b| b.positions[1] = 18),
        ("a context that does not end the span", |b| b.spans[0].context_len = 17),
        ("a context shorter than its rows", |b| b.spans[0].context_len = 1),
        ("rows out of order", |b| b.spans.swap(0, 1)),
        ("a table too short", |b| b.spans[0].table = 0..1),
        ("a table outside the blocks", |b| b.spans[1].table = 2..4),
        ("a block outside the pool", |b| b.tables[0][1] = BlockId(4)),
        ("a block of the other group outside the pool", |b| b.tables[1][2] = BlockId(4)),
        ("tables of one group missing", |b| b.tables.truncate(1)),
        ("tables of a group too many", |b| b.tables.push(b.tables[0].clone())),
        ("tables of different lengths", |b| b.tables[1].truncate(2)),
        ("an output row twice", |b| b.output_rows = vec![1, 1]),
        ("an output row outside", |b| b.output_rows = vec![3]),
    ];
    for (name, fault) in faults {
        let mut batch = good();
        fault(&mut batch);
        assert!(batch.check(LIMITS).is_err(), "{name}");
    }
}
