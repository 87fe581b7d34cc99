use std::num::NonZeroUsize;

use proptest::prelude::*;

use super::*;
use crate::plan::shape::{Attention, GroupedAttention};

mod published;

/// A request for a model by name on cards by name, with a server's usual bounds.
fn request(model: &str, gpus: &str, format: Option<WeightFormat>) -> PlanRequest {
    let model = models::find(model).expect("a name of the table");
    let format = format.unwrap_or(model.own_format());
    PlanRequest {
        devices: gpus::parse(gpus).expect("known cards").into_iter().map(RankDevice::Card).collect(),
        replicas: 1,
        shares: None,
        format,
        kv_format: format.kv(),
        limits: Limits {
            block_size: 16,
            max_model_len: model.context_max,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            is_batch_invariant: false,
            separate_processes: false,
        },
        utilization: None,
        kv_bytes: None,
        offloading_bytes: None,
        host_memory_bytes: None,
        formats: WeightFormat::ALL.to_vec(),
        model,
    }
}

fn plan(model: &str, gpus: &str, format: WeightFormat) -> Plan {
    Plan::new(&request(model, gpus, Some(format))).expect("a plan")
}

fn planned(request: &PlanRequest, change: impl FnOnce(&mut PlanRequest)) -> Plan {
    let mut request = request.clone();
    change(&mut request);
    Plan::new(&request).expect("a plan")
}

#[test]
fn models_are_found_by_the_spellings_that_people_use() {
    for (given, name) in [
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("GPT_OSS 20B", "gpt-oss-20b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "Llama-3.3-70B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("Qwen/Qwen3-235B-A22B", "Qwen3-235B-A22B"),
        ("qwen3-8b-base", "Qwen3-8B"),
        ("moonshotai/Kimi-K2-Instruct", "Kimi-K2"),
        ("zai-org/GLM-4.5-Air/", "GLM-4.5-Air"),
    ] {
        assert_eq!(models::find(given).expect(given).name, name);
    }
}

#[test]
fn an_unknown_model_is_answered_with_the_known_ones_and_the_nearest() {
    for (given, meant) in [
        ("gpt-os-120b", Some("gpt-oss-120b")),
        ("moonshotai/Kimi-K2-Instruct-0905", Some("Kimi-K2")),
        ("Qwen3-30B-A3B-Instruct-2507", Some("Qwen3-30B-A3B")),
        ("mixtral-8x22b", None),
        ("", None),
    ] {
        let error = models::find(given).expect_err(given);
        assert_eq!(error.meant, meant, "{given}");
        let text = error.to_string();
        assert!(models::names().all(|name| text.contains(name)), "{text}");
    }
    let long = models::find(&"x".repeat(1 << 20)).expect_err("no model").to_string();
    assert!(long.len() < 1000, "{}", long.len());
    assert!(!models::find("a\u{1b}[31m").expect_err("no model").to_string().contains('\u{1b}'));
}

#[test]
fn cards_are_read_as_people_write_them() {
    let names = |text: &str| -> Vec<String> {
        gpus::parse(text).expect(text).iter().map(|card| card.name.to_string()).collect()
    };
    assert_eq!(names("3xH100-80GB"), ["H100-80GB"; 3]);
    assert_eq!(names("8 x a100-40gb").len(), 8);
    assert_eq!(names("NVIDIA H100, rtx 4090"), ["H100-80GB", "RTX4090"]);
    assert_eq!(names("2xH100,1xL40S"), ["H100-80GB", "H100-80GB", "L40S"]);
    let explicit = &gpus::parse("2x48GB@864GBps").expect("explicit")[1];
    assert_eq!((explicit.memory_bytes, explicit.memory_bandwidth), (48_000_000_000, Some(864e9)));
    assert_eq!(gpus::parse("24GiB").expect("memory alone")[0].memory_bandwidth, None);
    for bad in [
        "",
        "0xH100",
        "9999999999999999999999xH100",
        "2000xH100",
        "H100x3",
        "GB@1GBps",
        "1e9GB",
        "-1GB",
        "48GB@x",
    ] {
        let error = gpus::parse(bad).expect_err(bad).to_string();
        assert!(error.contains("H100-80GB"), "{error}");
    }
    assert!(gpus::parse("4xH1000").is_err());
}

#[test]
fn a_card_of_this_machine_has_the_rates_of_its_name_and_the_memory_of_its_driver() {
    let card = gpus::of_driver("NVIDIA H100 80GB HBM3", 84_942_979_072, 132);
    assert_eq!((card.memory_bytes, card.memory_bandwidth), (84_942_979_072, Some(3350e9)));
    assert_eq!(gpus::of_driver("NVIDIA L40S", 1, 1).flops, Some(362e12));
    assert_eq!(gpus::of_driver("Software Device", 1, 1).memory_bandwidth, None);
}

#[test]
fn the_shape_alone_gives_what_the_cuda_model_lays_out() {
    for (name, gpus) in [("Llama-3.1-8B", "L40S"), ("Llama-3.3-70B", "4xH100"), ("Llama-3.3-70B", "3xH200")] {
        let exact = plan(name, gpus, WeightFormat::BFloat16);
        let request = request(name, gpus, Some(WeightFormat::BFloat16));
        let shape = planned(&request, |request| request.model.config = None);
        for (exact, shape) in exact.ranks.iter().zip(&shape.ranks) {
            let near = |exact: u64, shape: u64, part: f64| {
                let difference = exact.abs_diff(shape) as f64 / exact as f64;
                assert!(difference < part, "{name} on {gpus}: {exact} laid out, {shape} by the shape");
            };
            near(exact.weight_bytes(), shape.weight_bytes(), 0.001);
            near(exact.workspace_bytes, shape.workspace_bytes, 0.2);
        }
    }
}

#[test]
fn pages_are_those_that_the_engine_takes() {
    let model = models::find("Llama-3.1-8B").expect("a name");
    let config = model.config.clone().expect("it runs");
    for ranks in [1, 3, 12] {
        let partition = Partition::new(&config, ranks, None).expect("divides");
        let cache = cache_shape(&model, &request("Llama-3.1-8B", "H100", None).limits);
        for share in partition.shares() {
            for (dtype, format) in [(DType::BF16, KvFormat::BFloat16), (DType::F32, KvFormat::Float32)] {
                let layout = model::kv_layout(&config, share, dtype, 16).expect("laid out");
                assert_eq!(cache.page_bytes(&model, share, format), layout.block_bytes());
            }
        }
    }
}

#[test]
fn more_ranks_than_kv_heads_copy_keys_and_values() {
    let per_token = |ranks: usize| {
        let plan = plan("Qwen3-235B-A22B", &format!("{ranks}xH200"), WeightFormat::BFloat16);
        plan.ranks.iter().map(|rank| rank.page_bytes).sum::<u64>() / 16
    };
    assert_eq!(per_token(4), 188 << 10);
    assert_eq!(per_token(8), 2 * (188 << 10));
    let latent = plan("Kimi-K2", "8xB200", WeightFormat::Fp8);
    assert!(latent.ranks.iter().all(|rank| rank.page_bytes == 16 * 70_272), "whole on every rank");
}

#[test]
fn experts_divide_on_the_blocks_of_their_format() {
    let columns = |format| -> Vec<usize> {
        let plan = plan("Kimi-K2", "3xB200", format);
        plan.ranks.iter().map(|rank| rank.share.expert_columns.len()).collect()
    };
    assert_eq!(columns(WeightFormat::Fp8), [768, 640, 640]);
    assert_eq!(columns(WeightFormat::BFloat16), [704, 704, 640]);
    let many = plan("gpt-oss-120b", "50xL40S", WeightFormat::Mxfp4);
    assert!(many.ranks.iter().all(|rank| rank.share.expert_columns.start.is_multiple_of(32)));
}

#[test]
fn what_is_short_is_told_with_the_smallest_change_and_that_change_does_it() {
    let request = request("Llama-3.3-70B", "2xH100-80GB", None);
    let short = Plan::new(&request).expect("a plan");
    let text = short.verdict();
    assert!(text.contains("rank 0 on H100-80GB lacks 9.4 GB"), "{text}");
    assert!(text.contains("the smallest change: max_model_len = 73776"), "{text}");
    let context = |tokens| planned(&request, |request| request.limits.max_model_len = tokens).fits();
    assert!(context(73_776) && !context(73_776 + 16));
    let wanted = Change::Ranks { ranks: 3, device: "H100-80GB".to_owned(), replicas: 1 };
    assert!(short.changes().contains(&wanted), "{text}");
    assert!(planned(&request, |r| r.devices.push(r.devices[0].clone())).fits());
}

#[test]
fn a_utilization_that_is_too_low_is_raised_as_far_as_needed() {
    let request = request("gpt-oss-120b", "3xH100-80GB", Some(WeightFormat::BFloat16));
    let low = planned(&request, |request| request.utilization = Some(0.9));
    assert!(matches!(low.shortfall(), Some(Shortfall::Model { rank: 0, .. })), "{:?}", low.shortfall());
    let Some(Change::Utilization(part)) = low.changes().first().cloned() else { panic!("{}", low.verdict()) };
    let at = |part| planned(&request, |request| request.utilization = Some(part)).fits();
    assert!(at(part) && !at(part - 0.001), "{part}");
}

#[test]
fn the_checkpoints_own_format_comes_before_more_cards_and_lossy_ones_after() {
    let changes = plan("gpt-oss-120b", "H100-80GB", WeightFormat::BFloat16).changes();
    let own = Change::Format { format: WeightFormat::Mxfp4, is_stored: true };
    assert_eq!(changes.first(), Some(&own), "{changes:?}");
    let changes = plan("Qwen3-32B", "L40S", WeightFormat::BFloat16).changes();
    let at = |wanted: &dyn Fn(&Change) -> bool| changes.iter().position(wanted).expect("proposed");
    let more = at(&|change| matches!(change, Change::Ranks { ranks: 2, .. }));
    assert!(more < at(&|change| matches!(change, Change::Format { is_stored: false, .. })), "{changes:?}");
}

#[test]
fn bfloat16_is_the_checkpoints_own_format_only_where_it_holds_that() {
    let request = request("Llama-3.1-8B", "L40S", Some(WeightFormat::Float32));
    let changes = |stored| planned(&request, |request| request.model.stored = stored).changes();
    let at = |changes: &[Change], wanted: &dyn Fn(&Change) -> bool| changes.iter().position(wanted);
    let own = changes(Some(WeightFormat::BFloat16));
    let format = |is_stored| Change::Format { format: WeightFormat::BFloat16, is_stored };
    assert!(
        at(&own, &|change| *change == format(true))
            < at(&own, &|change| matches!(change, Change::Ranks { .. }))
    );
    // Float16 has more digits, and so may what has no name here.
    for stored in [None, Some(WeightFormat::Float32)] {
        let other = changes(stored);
        let lossy = at(&other, &|change| *change == format(false)).expect("it is smaller");
        assert!(
            at(&other, &|change| matches!(change, Change::Ranks { .. })).is_some_and(|more| more < lossy)
        );
        assert!(!other.contains(&format(true)), "{other:?}");
    }
}

#[test]
fn no_change_is_made_up_where_none_helps() {
    let hopeless = plan("Kimi-K2", "1x1GB", WeightFormat::Mxfp4);
    assert!(!hopeless.fits());
    assert!(hopeless.verdict().contains("no single change makes it fit"), "{}", hopeless.verdict());
    assert_eq!(hopeless.users(2048, Policy::WindowsFreed, KvFormat::Fp8), Some(0));
}

#[test]
fn given_memory_is_used_whole_and_held_against_what_there_is() {
    let request = request("Llama-3.1-8B", "L40S", None);
    let page = 16 * (128 << 10);
    let given = |bytes| planned(&request, |request| request.kv_bytes = Some(bytes));
    assert_eq!((given(8192 * page).pool_pages(), given(8192 * page).fits()), (8192, true));
    let few = given(8192 * page - 1);
    assert!(matches!(few.shortfall(), Some(Shortfall::Given { is_asked_for: true, .. })));
    assert_eq!(few.changes().first(), Some(&Change::KvBytes(8192 * page)));
    let many = given(1 << 40);
    assert!(matches!(many.shortfall(), Some(Shortfall::Asked { rank: 0, .. })), "{:?}", many.shortfall());
    let Some(Change::KvBytes(room)) = many.changes().first().cloned() else { panic!("{}", many.verdict()) };
    assert!(given(room).fits() && !given(room + page).fits());
}

#[test]
fn the_pool_is_no_larger_than_all_sequences_could_use() {
    let request = request("Llama-3.1-8B", "H200", None);
    let few = planned(&request, |r| (r.limits.max_num_seqs, r.limits.max_model_len) = (2, 4096));
    assert_eq!(few.pool_pages(), 512);
    assert!(few.pages() > 512);
}

#[test]
fn the_hosts_memory_is_shared_by_all_ranks() {
    let request = request("Llama-3.1-8B", "L40S", None);
    let on_host = |memory: u64, tokens| {
        planned(&request, |request| {
            request.devices = vec![RankDevice::Host; 2];
            request.host_memory_bytes = Some(memory);
            request.limits.max_model_len = tokens;
        })
    };
    assert!(on_host(32_000_000_000, 4096).fits());
    let small = on_host(16_000_000_000, 4096);
    assert!(matches!(small.shortfall(), Some(Shortfall::Host { .. })), "{:?}", small.shortfall());
    let long = on_host(32_000_000_000, 131_072);
    assert!(matches!(long.shortfall(), Some(Shortfall::Given { is_asked_for: false, .. })));
    assert!(long.verdict().contains("the default"), "{}", long.verdict());
    assert_eq!(long.step(1, 2048), None, "a processor's rates are unknown");
}

#[test]
fn smaller_steps_are_proposed_only_where_they_carry_all_sequences() {
    let request = request("Llama-3.1-8B", "1x24GB@1TBps", None);
    // A workspace that is too large by a little more than half of it.
    let large = planned(&request, |r| {
        (r.limits.max_num_batched_tokens, r.limits.max_model_len) = (1 << 16, 1024);
    });
    let proposed = |plan: &Plan| {
        plan.changes().iter().find_map(|change| match change {
            Change::BatchedTokens(tokens) => Some(*tokens),
            _ => None,
        })
    };
    assert!(!large.fits());
    let tokens = proposed(&large).expect("smaller steps fit");
    assert!((256..1 << 16).contains(&tokens));
    let crowded = planned(&large.request, |r| r.limits.max_num_seqs = tokens + 1);
    assert_eq!(proposed(&crowded), None, "{:?}", crowded.changes());
}

#[test]
fn all_replicas_and_what_they_evict_share_the_hosts_memory() {
    let of_one = request("Llama-3.1-8B", "L40S", None);
    let on_host = |replicas, offloading_bytes| {
        planned(&of_one, |request| {
            request.devices = vec![RankDevice::Host];
            request.limits.max_model_len = 4096;
            (request.replicas, request.offloading_bytes) = (replicas, offloading_bytes);
            request.host_memory_bytes = Some(40_000_000_000);
        })
    };
    assert!(on_host(1, None).fits() && on_host(2, None).fits());
    assert!(on_host(1, Some(8_000_000_000)).fits());
    let short = on_host(2, Some(8_000_000_000));
    let Some(Shortfall::Host { offloading_bytes: 16_000_000_000, replicas: 2, .. }) = short.shortfall()
    else {
        panic!("{:?}", short.shortfall())
    };
    let verdict = short.verdict();
    assert!(verdict.contains("kv_offloading_bytes asks for 16.0 GB over 2 replicas"), "{verdict}");
    let Some(Change::OffloadingBytes(bytes)) = short.changes().first().cloned() else { panic!("{verdict}") };
    assert!(on_host(2, Some(bytes)).fits() && !on_host(2, Some(bytes + (2 << 20))).fits(), "{verdict}");
    // Cards keep what they hold; the host's part is what they evict.
    let on_card = planned(&of_one, |request| {
        (request.offloading_bytes, request.host_memory_bytes) = (Some(3 << 30), Some(2 << 30));
    });
    let verdict = on_card.verdict();
    assert!(
        verdict.contains("the host lacks 1.1 GB: kv_offloading_bytes asks for 3.2 GB, and its"),
        "{verdict}"
    );
}

#[test]
fn more_cards_are_proposed_for_each_replica() {
    let request = request("Llama-3.3-70B", "2xH100-80GB", None);
    let verdict = planned(&request, |request| request.replicas = 2).verdict();
    assert!(verdict.contains("does not fit on 2 x H100-80GB for each of 2 replicas: rank 0"), "{verdict}");
    assert!(verdict.contains("or 3 x H100-80GB for each of 2 replicas;"), "{verdict}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let request = request("Llama-3.1-8B", "L40S", None);
    let refused = |change: fn(&mut PlanRequest)| {
        let mut request = request.clone();
        change(&mut request);
        Plan::new(&request).expect_err("refused").to_string()
    };
    assert!(refused(|r| r.format = WeightFormat::Mxfp4).contains("experts"));
    assert!(refused(|r| r.limits.block_size = 0).contains("block_size is 0"));
    assert!(refused(|r| r.limits.max_model_len = usize::MAX).contains("max_model_len"));
    assert!(refused(|r| r.limits.max_model_len = 131_073).contains("131072 positions that Llama-3.1-8B"));
    assert!(refused(|r| r.limits.block_size = 24).contains("multiple of 16 up to 256"));
    assert!(refused(|r| r.limits.block_size = 512).contains("block_size is 512"));
    assert!(refused(|r| r.limits.max_num_batched_tokens = 255).contains("max_num_seqs = 256"));
    assert!(refused(|r| r.replicas = 0).contains("data_parallel_size is 0"));
    assert!(refused(|r| r.devices.clear()).contains("tensor_parallel_size is 0"));
    assert!(refused(|r| r.devices = vec![r.devices[0].clone(); 33]).contains("at most 32 ranks"));
    assert!(refused(|r| r.shares = Some(vec![1.0, 2.0])).contains("weights"));
}

#[test]
fn a_step_waits_for_what_the_cards_are_slow_at() {
    let limit = |gpus: &str, batch| {
        let step = plan("Llama-3.3-70B", gpus, WeightFormat::BFloat16).step(batch, 128).expect("rates");
        assert!(step.seconds >= step.memory_seconds.max(step.compute_seconds.unwrap_or(0.0)));
        step.limit
    };
    assert_eq!(limit("4xH100-80GB", 1), Limit::Memory);
    assert_eq!(limit("4xH100-80GB", 1024), Limit::Compute);
    assert_eq!(limit("8xL40S", 128), Limit::Link);
    let alone = plan("Llama-3.1-8B", "H100", WeightFormat::BFloat16).step(8, 2048).expect("rates");
    assert_eq!((alone.sums, alone.link_bytes, alone.link_seconds), (0, 0.0, 0.0));
    assert!((alone.tokens_per_second() * alone.seconds - 8.0).abs() < 1e-9);
}

#[test]
fn experts_are_hit_as_often_as_chance_has_it() {
    let plan = plan("gpt-oss-120b", "H100-80GB", WeightFormat::Mxfp4);
    let hit = |batch| plan.step(batch, 128).expect("rates").experts_read;
    assert!((hit(1) - 4.0).abs() < 1e-9);
    // 128 (1 - (124 / 128)^8)
    assert!((hit(8) - 28.71).abs() < 0.01, "{}", hit(8));
    assert!(hit(4096) <= 128.0 && hit(4096) > 127.9);
}

fn windows(pattern: &[usize]) -> Vec<Option<NonZeroUsize>> {
    pattern.iter().map(|&window| NonZeroUsize::new(window)).collect()
}

proptest! {
    #[test]
    fn no_shape_breaks_the_arithmetic(
        heads in 1usize..200, group in 1usize..20, dim in 1usize..1000, hidden in 1usize..100_000,
        columns in 0usize..1_000_000, vocabulary in 1usize..10_000_000, layers in 1usize..300, window in 0usize..5000,
        ranks in 1usize..40, length in 1usize..10_000_000, gigabytes in 1usize..1_000_000,
    ) {
        let shape = ModelShape {
            hidden,
            vocabulary,
            attention: Attention::Grouped(GroupedAttention {
                query_heads: heads * group, kv_heads: heads, head_dim: dim, ..GroupedAttention::default()
            }),
            windows: windows(&(0..layers).map(|layer| if layer % 3 == 0 { 0 } else { window }).collect::<Vec<_>>()),
            dense_layers: layers,
            dense_columns: columns,
            config: None,
            ..models::find("Qwen3-8B").unwrap()
        };
        let mut request = request("Qwen3-8B", &format!("{ranks}x{gigabytes}GB@1TBps"), None);
        request.model = ModelShape { context_max: length, ..shape };
        request.limits.max_model_len = length;
        let Ok(plan) = Plan::new(&request) else {
            prop_assert!(ranks > heads * group);
            return Ok(());
        };
        for policy in [Policy::Reserved, Policy::Paged, Policy::WindowsFreed] {
            let users = plan.users(length, policy, KvFormat::BFloat16).unwrap();
            prop_assert!(users.saturating_mul(plan.cache.pages(length, policy)) <= plan.pages());
        }
        prop_assert_eq!(plan.fits(), plan.users(length, Policy::WindowsFreed, KvFormat::BFloat16).unwrap() > 0);
        prop_assert!(plan.step(8, length).unwrap().seconds > 0.0);
        for change in plan.changes() {
            prop_assert!(!change.to_string().is_empty());
        }
    }
}
