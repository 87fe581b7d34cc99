use std::{io, time::Duration};

use clap::{CommandFactory, Parser};
use consort_actors::{RankStatus, ShardState};
use consort_parallel::ids::Rank;

use super::{args::Cli, client::EventSplitter, report};

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn both_names_of_the_width_are_taken() {
    for flag in ["--tp", "--tensor-parallel-size"] {
        assert!(Cli::try_parse_from(["consort", "run", "model", "hello", flag, "3"]).is_ok(), "{flag}");
    }
}

#[test]
fn wrong_usage_ends_with_code_two() {
    for arguments in
        [vec!["consort"], vec!["consort", "run", "model"], vec!["consort", "serve", "m", "--tp", "x"]]
    {
        assert_eq!(Cli::try_parse_from(&arguments).expect_err("wrong usage").exit_code(), 2, "{arguments:?}");
    }
}

#[test]
fn events_are_cut_wherever_the_network_cuts_them() {
    let wire = b"data: {\"a\":1}\n\ndata: \xc3\xa9\n\n: comment\n\ndata: [DONE]\n\n";
    for size in 1..wire.len() {
        let mut splitter = EventSplitter::default();
        let mut payloads = Vec::new();
        for part in wire.chunks(size) {
            payloads.extend(splitter.push(part).expect("short lines"));
        }
        assert_eq!(payloads, ["{\"a\":1}", "é", "[DONE]"], "cut every {size} bytes");
    }
}

#[test]
fn an_endless_event_is_refused() {
    let mut splitter = EventSplitter::default();
    assert!(splitter.push(&vec![b'x'; 2 << 20]).is_err());
}

#[test]
fn a_rank_tells_its_heads_bytes_and_blocks() {
    let rank = RankStatus {
        rank: Rank(0),
        query_heads: 0..3,
        kv_heads: 0..1,
        weight_bytes: 89_700_000,
        kv_bytes: 2_000,
        kv_blocks: 12,
        state: ShardState::Ready,
        restarts: 0,
    };
    let expected = "rank 0: query heads 0..3, KV heads 0..1, weights 89.7 MB, 12 KV blocks (2.0 kB)";
    assert_eq!(report::rank_line(&rank), expected);
}

#[test]
fn speed_counts_the_tokens_after_the_first() {
    let (first, last) = (Duration::from_millis(500), Duration::from_millis(2500));
    assert_eq!(report::speed(11, first, last), "11 tokens, first after 0.50 s, then 5.0 tokens/s");
    assert_eq!(report::speed(1, first, first), "1 tokens, first after 0.50 s");
}

#[test]
fn causes_are_told_once_each() {
    let error = anyhow::Error::from(io::Error::other("inner")).context("outer");
    assert_eq!(report::chain(&error), "error: outer\n  caused by: inner");
}

#[test]
fn a_broken_pipe_is_found_below_other_causes() {
    let broken = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("writing");
    assert!(report::is_broken_pipe(&broken));
    assert!(!report::is_broken_pipe(&anyhow::anyhow!("other")));
}
