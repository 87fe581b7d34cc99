use super::*;

fn source(path: &str, text: &str) -> Source {
    Source::new(path.to_owned(), text.to_owned())
}

#[test]
fn a_clock_or_an_unordered_map_in_a_pure_module_is_named_with_its_line() {
    let sources = [
        source("core/state.rs", "use std::collections::HashMap;\nfn f() {}\n"),
        source("core/plan.rs", "// Instant gratification\nfn f() { let t = std::time::Instant::now(); }\n"),
        source("core/tests.rs", "use std::collections::HashMap;\n"),
        source("shell.rs", "use tokio::sync::Mutex;\n"),
    ];
    let found = check(&sources, &["core/"]);
    assert_eq!(found.errors.len(), 2, "{:?}", found.errors);
    assert!(found.errors[0].starts_with("core/state.rs:1: `HashMap`"));
    assert!(found.errors[1].starts_with("core/plan.rs:2: `Instant`"));
}

#[test]
fn a_pure_module_that_moved_away_is_an_error() {
    assert_eq!(check(&[source("a.rs", "")], &["b.rs"]).errors.len(), 1);
    assert!(check(&[source("a.rs", "fn f() {}")], &["a.rs"]).errors.is_empty());
}
