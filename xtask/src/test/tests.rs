use super::*;

fn args(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

#[test]
fn summaries_of_all_binaries_are_added_up() {
    let mut tally = Tally::default();
    for line in [
        "running 3 tests",
        "test scheduler::never_lies ... ok",
        "test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.01s",
        "test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.50s",
    ] {
        tally.add_line(line);
    }
    assert_eq!(tally, Tally { passed: 7, failed: 2, ignored: 1 });
}

#[test]
fn a_coloured_summary_counts_and_a_quoted_one_does_not() {
    let mut tally = Tally::default();
    tally.add_line("test result: \u{1b}[32mok\u{1b}(B\u{1b}[m. 5 passed; 0 failed; 0 ignored; 0 measured");
    tally.add_line("a test printed: test result: ok. 9 passed; 0 failed");
    tally.add_line("test result: nonsense");
    assert_eq!(tally, Tally { passed: 5, failed: 0, ignored: 0 });
}

#[test]
fn the_whole_workspace_is_tested_unless_packages_are_named() {
    assert!(!chooses_packages(&args(&["scheduler", "--lib", "--", "-p"])));
    for chosen in [&["-p", "consort"][..], &["-pconsort"], &["--package=consort", "x"], &["--workspace"]] {
        assert!(chooses_packages(&args(chosen)), "{chosen:?}");
    }
}
