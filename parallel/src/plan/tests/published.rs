//! Figures that makers publish, or that follow from what they publish; and those that documentation promises.

use super::*;

const BF16: KvFormat = KvFormat::BFloat16;

#[track_caller]
fn close(actual: f64, published: f64, within: f64) {
    assert!((actual - published).abs() <= within, "{actual} is not {published}");
}

#[test]
fn parameters_are_as_published_to_the_last_digit_given() {
    // Billions in all, and billions that a token is multiplied by.
    let published = [
        ("gpt-oss-20b", 20.91, 3.61),
        ("gpt-oss-120b", 116.83, 5.13),
        ("Llama-3.1-8B", 8.03, 7.50),
        ("Llama-3.3-70B", 70.55, 69.50),
        ("Qwen3-8B", 8.19, 7.57),
        ("Qwen3-32B", 32.76, 31.98),
        ("Qwen3-30B-A3B", 30.53, 3.04),
        ("Qwen3-235B-A22B", 235.09, 21.57),
        ("GLM-4.5-Air", 106.85, 12.80),
        ("GLM-4.5", 352.80, 32.86),
        ("Kimi-K2", 1026.41, 31.69),
    ];
    assert_eq!(published.len(), models::names().count());
    for (name, all, active) in published {
        let model = models::find(name).expect(name);
        close(model.parameters() as f64 / 1e9, all, 0.005);
        close(model.active_parameters() as f64 / 1e9, active, 0.005);
    }
}

#[test]
fn bytes_of_weights_are_as_published() {
    let gigabytes = |name: &str, format: Option<WeightFormat>| {
        let model = models::find(name).expect(name);
        model.weight_bytes(format.unwrap_or(model.own_format())) as f64 / 1e9
    };
    for (name, published) in [
        ("gpt-oss-120b", 233.7),
        ("gpt-oss-20b", 41.8),
        ("Llama-3.3-70B", 141.1),
        ("Qwen3-32B", 65.5),
        ("Qwen3-235B-A22B", 470.2),
        ("Qwen3-30B-A3B", 61.1),
        ("Kimi-K2", 2052.8),
        ("GLM-4.5", 705.6),
        ("GLM-4.5-Air", 213.7),
    ] {
        close(gigabytes(name, Some(WeightFormat::BFloat16)), published, 0.06);
    }
    close(gigabytes("gpt-oss-120b", None), 65.25, 0.01);
    close(gigabytes("gpt-oss-20b", None), 13.76, 0.01);
}

#[test]
fn bytes_of_a_tokens_keys_and_values_are_as_published() {
    for (name, bytes) in [
        ("gpt-oss-120b", 72 << 10),
        ("gpt-oss-20b", 48 << 10),
        ("Llama-3.3-70B", 320 << 10),
        ("Qwen3-32B", 256 << 10),
        ("Qwen3-235B-A22B", 188 << 10),
        ("Qwen3-30B-A3B", 96 << 10),
        ("Kimi-K2", 70_272),
        ("GLM-4.5", 368 << 10),
        ("GLM-4.5-Air", 184 << 10),
    ] {
        let model = models::find(name).expect(name);
        assert_eq!(model.kv_bytes_per_token(BF16), bytes, "{name}");
        assert_eq!(model.kv_bytes_per_token(KvFormat::Fp8), bytes / 2, "{name}");
    }
}

#[test]
fn windows_halve_what_a_token_of_gpt_oss_costs_and_take_five_mebibytes_a_sequence() {
    let plan = plan("gpt-oss-120b", "3xH100-80GB", WeightFormat::BFloat16);
    let (model, cache) = (&plan.request.model, &plan.cache);
    assert_eq!(model.kv_bytes_per_token(BF16), 72 << 10);
    assert_eq!(model.kv_bytes_per_kept_token(BF16), 36 << 10);
    assert_eq!((cache.groups.layers_per_page(), cache.groups.count()), (18, 2));
    assert_eq!(cache.pages_of_window(128), 9);
    // 18 layers x 9 pages x 16 tokens x 2 KiB.
    assert_eq!(model.kv_bytes_of_windows(cache, BF16), 5_308_416);
    for (tokens, published, within) in
        [(2048, 75e6, 1e6), (8192, 300e6, 3e6), (32_768, 1.2e9, 0.02e9), (131_072, 4.8e9, 0.05e9)]
    {
        close((tokens * model.kv_bytes_per_kept_token(BF16)) as f64, published, within);
        // Page by page over all ranks it is that, and the windows' share.
        let of_all: u64 = plan.ranks.iter().map(|rank| rank.page_bytes).sum();
        let paged = cache.pages(tokens as usize, Policy::WindowsFreed) * of_all;
        assert_eq!(paged, tokens * (36 << 10) + 5_308_416);
    }
    // Without windows, with one, and the part of its prompt that runs: 131,072 and 2,048 tokens of 16 a page.
    assert_eq!(cache.chunk_pages(131_072, Policy::WindowsFreed), 128);
    assert_eq!(plan.pages_needed(), 8192 + 9 + 128);
}

#[test]
fn gpt_oss_120b_in_bf16_needs_three_80_gb_cards_and_one_in_mxfp4() {
    let bf16 = |gpus: &str| plan("gpt-oss-120b", gpus, WeightFormat::BFloat16);
    assert!(!bf16("1xH100-80GB").fits() && !bf16("2xH100-80GB").fits());
    let three = bf16("3xH100-80GB");
    assert!(three.fits(), "{}", three.verdict());
    close(three.weight_bytes() as f64 / 1e9, 234.0, 0.5);
    assert!(plan("gpt-oss-120b", "H100-80GB", WeightFormat::Mxfp4).fits());
    let wanted = Change::Ranks { ranks: 3, device: "H100-80GB".to_owned(), replicas: 1 };
    assert!(bf16("1xH100-80GB").changes().contains(&wanted));
}

#[test]
fn three_ranks_of_gpt_oss_120b_hold_what_is_promised() {
    let plan = plan("gpt-oss-120b", "3xH100-80GB", WeightFormat::BFloat16);
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    close(plan.weight_bytes() as f64 / 1e9, 233.7, 0.05);
    close(gib(plan.weight_bytes()) / 3.0, 72.5, 0.1);
    let heads: Vec<usize> = plan.ranks.iter().map(|rank| rank.share.query_heads.len()).collect();
    assert_eq!(heads, [24, 24, 16]);
    for rank in &plan.ranks {
        close(gib(rank.weight_bytes()), 72.5, 0.2);
        assert_eq!(rank.share.expert_columns.len(), 960);
        assert!(rank.share.vocabulary.len() <= 67_072);
    }
}

#[test]
fn three_h100_serve_gpt_oss_120b_in_bf16_to_as_many_users_as_promised() {
    let plan = plan("gpt-oss-120b", "3xH100-80GB", WeightFormat::BFloat16);
    let users = |tokens, policy| plan.users(tokens, policy, BF16).expect("within the context");
    let freed = users(2048, Policy::WindowsFreed);
    assert!((135..=185).contains(&freed), "{freed}");
    let kept = users(2048, Policy::Paged) as f64;
    close(kept / freed as f64, 0.5, 0.05);
    let (freed, kept) = (users(8192, Policy::WindowsFreed), users(8192, Policy::Paged));
    assert!((35..=48).contains(&freed), "{freed}");
    close(kept as f64 / freed as f64, 0.5, 0.05);
    let in_fp8 = [2048, 8192, 32_768, 131_072].map(|tokens| {
        [Policy::Reserved, Policy::Paged, Policy::WindowsFreed]
            .map(|policy| plan.users(tokens, policy, KvFormat::Fp8).expect("within the context"))
    });
    assert_eq!(in_fp8.map(|[.., freed]| freed), [332, 87, 22, 5]);
    assert_eq!(in_fp8.map(|[_, kept, _]| kept), [178, 44, 11, 2]);
    assert_eq!(in_fp8.map(|[reserved, ..]| reserved), [5; 4]);
    let reserves = plan.ranks[0].reserves;
    assert_eq!(reserves.total_bytes(), 2048 << 20, "{reserves:?}");
    assert_eq!(plan.ranks[0].memory_bytes, Some(81_559 << 20));
}

#[test]
fn one_h100_serves_gpt_oss_120b_in_mxfp4_to_three_users_reserved_and_fifty_paged() {
    let plan = plan("gpt-oss-120b", "H100-80GB", WeightFormat::Mxfp4);
    assert_eq!(plan.users(8192, Policy::Reserved, BF16), Some(3));
    let paged = plan.users(8192, Policy::WindowsFreed, BF16).expect("within the context");
    assert!((50..=60).contains(&paged), "{paged}");
}

#[test]
fn one_decode_of_gpt_oss_120b_reads_five_gigabytes_in_mxfp4_and_ten_in_bf16() {
    let read = |gpus: &str, format| {
        let step = plan("gpt-oss-120b", gpus, format).step(1, 2048).expect("rates are known");
        assert_eq!((step.experts_read, step.limit), (4.0, Limit::Memory));
        step.weight_bytes / 1e9
    };
    close(read("H100-80GB", WeightFormat::Mxfp4), 5.00, 0.01);
    close(read("2xB200,1xB200", WeightFormat::BFloat16) * 3.0, 10.27, 0.3);
}
