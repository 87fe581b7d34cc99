use super::*;

fn source(path: &str, text: &str) -> Source {
    Source::new(path.to_owned(), text.to_owned())
}

const LEAF: &str = "//! Maps memory.\n#![allow(unsafe_code)]\nfn f() {\n    unsafe { g() }\n}\n";
const CHILD: &str = "fn f() {\n    unsafe { g() }\n}\n";

#[test]
fn a_named_leaf_may_be_unsafe() {
    let sources = [source("kernels/src/sys/mmap.rs", LEAF), source("a/src/lib.rs", "fn safe() {}\n")];
    assert_eq!(check(&sources, &["kernels/src/sys/"]), Findings::default());
    assert_eq!(check(&sources, &["kernels/src/sys/mmap.rs"]), Findings::default());
}

#[test]
fn permission_outside_the_leaves_is_refused() {
    let sources = [source("kernels/src/sys/mmap.rs", LEAF), source("actors/src/shard.rs", LEAF)];
    let found = check(&sources, &["kernels/src/sys/"]);
    assert_eq!(found.errors.len(), 1, "{found:?}");
    assert!(found.errors[0].starts_with("actors/src/shard.rs:2: allows unsafe code, but"), "{found:?}");
}

#[test]
fn unsafe_without_permission_is_refused_even_in_a_leaf() {
    let sources = [source("kernels/src/sys/mmap.rs", LEAF), source("kernels/src/sys/futex.rs", CHILD)];
    let found = check(&sources, &["kernels/src/sys/"]);
    assert_eq!(found.errors, ["kernels/src/sys/futex.rs:2: unsafe code, not allowed in this file"]);
}

#[test]
fn permission_for_one_item_is_permission() {
    let item = "#[allow(unsafe_code)]\nfn f() {\n    unsafe { g() }\n}\n";
    assert_eq!(check(&[source("kernels/src/team.rs", item)], &["kernels/src/team.rs"]), Findings::default());
}

#[test]
fn a_module_file_speaks_for_the_files_below_it() {
    let parent = "#![allow(unsafe_code)]\nmod avx2;\n";
    for path in ["kernels/src/simd/mod.rs", "kernels/src/simd.rs"] {
        let sources = [source(path, parent), source("kernels/src/simd/avx2.rs", CHILD)];
        assert_eq!(check(&sources, &[path]), Findings::default());
    }
}

#[test]
fn a_crate_root_speaks_for_itself_alone() {
    let sources = [source("kernels/src/lib.rs", LEAF), source("kernels/src/team.rs", CHILD)];
    let found = check(&sources, &["kernels/src/"]);
    assert_eq!(found.errors.len(), 1, "{found:?}");
    assert!(found.errors[0].starts_with("kernels/src/team.rs:2"), "{found:?}");
}

#[test]
fn permissions_and_leaves_that_nothing_needs_are_refused() {
    let idle = source("kernels/src/sys/idle.rs", "#![allow(unsafe_code)]\n// unsafe once\n");
    let found = check(&[idle], &["kernels/src/sys/", "kernels/src/gone/"]);
    assert_eq!(found.errors.len(), 2, "{found:?}");
    assert!(
        found.errors[0].starts_with("kernels/src/sys/idle.rs: allows unsafe code and holds none"),
        "{found:?}"
    );
    assert!(found.errors[1].starts_with("kernels/src/gone/"), "{found:?}");
}
