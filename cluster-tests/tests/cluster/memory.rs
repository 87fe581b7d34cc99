//! Weights are held once, however many ranks share them.

use serde_json::json;

use crate::harness::{Served, model, one_model_at_a_time};

fn peak_of_width(width: &str) -> u64 {
    let arguments = ["--tp", width, "--max-model-len", "1024", "--kv-cache-memory-bytes", "100000000"];
    let server = Served::start(model().to_str().unwrap(), &arguments);
    let body = json!({"prompt": "Weights are held", "max_tokens": 4, "temperature": 0});
    assert_eq!(server.post("/v1/completions", &body).0, 200);
    server.peak_rss_bytes()
}

#[test]
fn three_ranks_take_at_most_a_quarter_more_memory_than_one() {
    let _guard = one_model_at_a_time();
    let (one, three) = (peak_of_width("1"), peak_of_width("3"));
    let ratio = three as f64 / one as f64;
    println!("peak RSS: width 1 {} MB, width 3 {} MB, ratio {ratio:.3}", one / 1_000_000, three / 1_000_000);
    assert!(ratio <= 1.25, "width 1 {one}, width 3 {three}");
}
