use super::*;

const H200: usize = 132;

/// (outputs, inputs) of layers, whole and in parts of groups, and of none.
const SHAPES: [(usize, usize); 14] = [
    (1, 1),
    (576, 576),
    (576, 1536),
    (960, 576),
    (768, 4096),
    (4096, 512),
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 3584),
    (128_256, 4096),
    (101, 40_000),
    (64, 0),
];

fn plans() -> impl Iterator<Item = (usize, usize, Plan)> {
    SHAPES.into_iter().flat_map(|(outputs, inputs)| {
        [1, 3, 8, 9, 16, 17, 40, 64, 100, 129, 1000, 8192].into_iter().flat_map(move |rows| {
            [4, 108, H200, 148].into_iter().flat_map(move |multiprocessors| {
                [Invariance::None, Invariance::Batch].map(|invariance| {
                    (rows, inputs, Plan::new(multiprocessors, outputs, inputs, rows, invariance))
                })
            })
        })
    })
}

#[test]
fn splits_share_all_steps_and_none_is_empty() {
    for (rows, inputs, plan) in plans() {
        let steps = row_stride(inputs).div_ceil(plan.tile.step);
        assert!(plan.splits >= 1, "{rows}: {plan:?}");
        assert!(plan.splits * plan.steps_per_split >= steps, "{rows}: {plan:?}");
        assert!(steps == 0 || (plan.splits - 1) * plan.steps_per_split < steps, "{rows}: {plan:?}");
        assert!(plan.splits == 1 || plan.steps_per_split >= plan.tile.steps_min, "{rows}: {plan:?}");
        assert!((1..=plan.tile.warps_max).contains(&plan.warps()));
        assert!(!plan.at_once || plan.splits > 1);
    }
}

#[test]
fn a_block_needs_no_more_shared_memory_than_every_card_has() {
    assert!(plans().all(|(_, _, plan)| plan.shared_bytes() <= 99 << 10));
}

#[test]
fn batch_invariant_splits_depend_on_the_weight_only() {
    for (outputs, inputs) in SHAPES {
        let splits = |rows, multiprocessors| {
            let plan = Plan::new(multiprocessors, outputs, inputs, rows, Invariance::Batch);
            assert_ne!(plan.tile.kernel, "linear_gemv");
            (plan.splits, plan.steps_per_split, plan.tile.step)
        };
        for rows in [1, 7, 8, 9, 40, 100, 5000] {
            for multiprocessors in [4, 80, H200] {
                assert_eq!(
                    splits(rows, multiprocessors),
                    splits(1, H200),
                    "{outputs} x {inputs}, {rows} rows"
                );
            }
        }
    }
}

#[test]
fn decode_keeps_two_blocks_at_work_on_each_multiprocessor_where_sums_are_long_enough() {
    let blocks = |outputs, inputs| {
        let plan = Plan::new(H200, outputs, inputs, 1, Invariance::None);
        (plan.tiles, plan.splits, plan.warps())
    };
    assert_eq!(blocks(6144, 4096), (384, 1, 8));
    assert_eq!(blocks(4096, 14336), (256, 2, 8));
    assert_eq!(blocks(768, 4096), (48, 6, 6), "an eighth of queries, keys and values");
    assert_eq!(blocks(576, 1536), (36, 3, 4));
    assert_eq!(blocks(4096, 512), (256, 1, 4), "too short to split");
    assert_eq!(blocks(28672, 4096), (1792, 1, 8));
}

#[test]
fn the_workspace_is_enough_for_every_number_of_rows_and_not_too_much() {
    for (outputs, inputs) in SHAPES {
        for multiprocessors in [4, H200] {
            for invariance in [Invariance::None, Invariance::Batch] {
                let mut most = WorkspaceLen::default();
                for rows in 1..700 {
                    most = most
                        .max(Plan::new(multiprocessors, outputs, inputs, rows, invariance).workspace_len());
                    let said = workspace_len(multiprocessors, outputs, inputs, rows, invariance);
                    assert_eq!(said, most, "{outputs} x {inputs}, {rows} rows, {invariance:?}");
                }
                let all_rows = workspace_len(multiprocessors, outputs, inputs, 1 << 30, invariance);
                assert!(all_rows.partials * 4 <= 20 << 20, "{outputs} x {inputs}: {all_rows:?}");
            }
        }
    }
}
