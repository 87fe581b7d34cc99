//! The ways in which CUDA ranks sum over ranks: kernels, NCCL, or what is faster at a size. Over the software driver,
//! whose NCCL adds in rank order as our kernels do; so all ways give the same bits.

use std::{sync::Arc, thread};

use consort_kernels::DType;
use consort_parallel::{
    checkpoint::Checkpoint,
    collective::{Collective, LocalGroup},
    model::{AllReduce, ModelError, load},
    partition::Partition,
};
use consort_software_driver::{Report, in_child_reported};

use crate::{
    harness::{Place, Setup, fixtures, teacher_forced},
    tiny,
};

const FIXTURE: &str = "tiny_llama_odd";
const THREE: (&str, &str) = ("CONSORT_SOFTWARE_DRIVER_DEVICES", "3");
const FAST: Place = Place::Cuda { deterministic: false };

fn checkpoint() -> Arc<Checkpoint> {
    Checkpoint::open(&fixtures().join(FIXTURE)).unwrap()
}

/// Logits of all prompts, by steps of up to so many tokens.
fn logits(all_reduce: AllReduce, chunk: usize) -> Vec<Vec<u32>> {
    let (prompts, _) = tiny::reference(FIXTURE);
    let setup = Setup { place: FAST, together: true, all_reduce, ..Setup::new(3, DType::BF16, chunk) };
    let rows = teacher_forced(&checkpoint(), setup, &prompts);
    rows.into_iter().map(|row| row.into_iter().map(f32::to_bits).collect()).collect()
}

/// How often NCCL summed on a rank, and how often it gathered.
fn nccl_calls(report: &Report, rank: usize) -> [u64; 2] {
    ["ncclAllReduce", "ncclBroadcast"]
        .map(|name| report.calls.get(&format!("{name}@{rank}")).copied().unwrap_or(0))
}

#[test]
fn software_driver_logits_are_the_same_by_kernels_by_nccl_and_by_what_is_faster() {
    let test = "sums::software_driver_logits_are_the_same_by_kernels_by_nccl_and_by_what_is_faster";
    let run = |way: AllReduce| {
        let report = in_child_reported(test, &[THREE, ("WAY", way.name())], || {
            let wanted = std::env::var("WAY").unwrap();
            let way = AllReduce::ALL.into_iter().find(|way| way.name() == wanted).unwrap();
            let (prompts, _) = tiny::reference(FIXTURE);
            // Whole prompts, and decodes from graphs.
            for chunk in [1000, prompts.len()] {
                let got = logits(way, chunk);
                assert!(got == logits(AllReduce::Kernels, chunk), "{way:?}, {chunk} tokens a step");
            }
        })?;
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{way:?}: {report:?}");
        Some(report)
    };
    let Some(by_nccl) = run(AllReduce::Nccl) else { return };
    for rank in 0..3 {
        let [sums, gathers] = nccl_calls(&by_nccl, rank);
        println!("rank {rank} by NCCL: {sums} sums, {gathers} broadcasts");
        assert!(sums > 100 && gathers > 100, "rank {rank}: {by_nccl:?}");
    }
    assert!(by_nccl.graph_launches > 20, "{by_nccl:?}");
    let Some(by_either) = run(AllReduce::Auto) else { return };
    let [sums, gathers] = nccl_calls(&by_either, 0);
    println!("by what is faster: {sums} sums by NCCL");
    // It was measured at least; what is gathered our kernel gathers.
    assert!(sums > 0 && gathers == 0, "{by_either:?}");
    let Some(by_kernels) = run(AllReduce::Kernels) else { return };
    assert!(!by_kernels.calls.contains_key("ncclGetUniqueId"), "{by_kernels:?}");
}

/// What the ranks of a group say that is to meet; whoever has met them waits for the others.
fn met(all_reduce: AllReduce, place: Place) -> Vec<Result<(), ModelError>> {
    let checkpoint = checkpoint();
    let partition = &Partition::new(checkpoint.config(), 3, None).unwrap();
    let setup = Setup { place, all_reduce, ..Setup::new(3, DType::BF16, 8) };
    let join = |comm: &mut dyn Collective| {
        let rank = comm.rank();
        let loaded = load(&setup.device(rank), &checkpoint, partition, rank, &setup.options(), &|_, _| {});
        let mut model = loaded.unwrap();
        model.join(comm)?;
        Ok(comm.barrier()?)
    };
    thread::scope(|scope| {
        let ranks: Vec<_> =
            LocalGroup::new(3).into_iter().map(|mut comm| scope.spawn(move || join(&mut comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn software_driver_devices_that_cannot_reach_each_other_sum_through_nccl_or_say_what_to_do() {
    let test =
        "sums::software_driver_devices_that_cannot_reach_each_other_sum_through_nccl_or_say_what_to_do";
    let apart = [THREE, ("CONSORT_SOFTWARE_DRIVER_PEERS", "0")];
    let report = in_child_reported(test, &apart, || {
        let (prompts, _) = tiny::reference(FIXTURE);
        let whole = logits(AllReduce::Auto, 1000);
        assert!(whole == logits(AllReduce::Nccl, 1000));
        assert!(logits(AllReduce::Auto, prompts.len()).len() == whole.len());
        let refused = |all_reduce, place| {
            let said = met(all_reduce, place).into_iter().map(|outcome| outcome.unwrap_err().to_string());
            said.collect::<Vec<_>>().join("; ")
        };
        let deterministic = refused(AllReduce::Auto, Place::Cuda { deterministic: true });
        assert!(deterministic.contains("3 ranks can sum through NCCL only"), "{deterministic}");
        let kernels = refused(AllReduce::Kernels, FAST);
        assert!(kernels.contains("or have them sum through NCCL: all_reduce = \"auto\""), "{kernels}");
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(!report.calls.contains_key("cuCtxEnablePeerAccess"), "{report:?}");
}

#[test]
fn software_driver_a_group_that_must_be_deterministic_does_not_open_nccl() {
    let test = "sums::software_driver_a_group_that_must_be_deterministic_does_not_open_nccl";
    let report = in_child_reported(test, &[THREE], || {
        for outcome in met(AllReduce::Auto, Place::Cuda { deterministic: true }) {
            outcome.unwrap();
        }
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
    assert!(!report.calls.keys().any(|name| name.starts_with("nccl")), "{report:?}");
}
