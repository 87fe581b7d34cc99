//! The example that embeds two engines in an actor system of its own, run as it is.

use crate::harness::{model, one_model_at_a_time};

#[path = "../../../examples/custom_supervision.rs"]
#[allow(dead_code, reason = "its main is for the command line")]
mod example;

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_ends_is_restarted_while_the_other_answers() {
    let _guard = one_model_at_a_time();
    example::run(model()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_cannot_start_are_given_up_and_the_example_says_so() {
    let error = example::run("no-such-model.gguf".into()).await.unwrap_err().to_string();
    assert!(error.contains("has given up seat"), "{error}");
}
