use super::*;
use crate::cubins::{
    occupancy::{self, Block},
    sass,
};

const SM_80: &str = include_str!("../sass/listing_sm_80.txt");
const SM_100A: &str = include_str!("../sass/listing_sm_100a.txt");

const TEXT: &str = "linear/kernel.cu";
const TABLE: &[Rule] =
    &[memory_bound(TEXT, "linear_gemv_*", NarrowLoads::Forbidden), matrix(TEXT, "linear_gemm_*")];

fn kernel(name: &str, dynamic_shared_bytes: u32) -> Kernel {
    let arch = "sm_80".parse().unwrap();
    let block = Block { threads: 64, registers: 32, static_shared_bytes: 0, dynamic_shared_bytes };
    let occupancy = occupancy::of(&block, occupancy::limits(arch).unwrap()).unwrap();
    Kernel { source: TEXT, arch, name: name.to_owned(), block, occupancy }
}

fn function(listing: &str, name: &str) -> Function {
    sass::parse(listing).unwrap().into_iter().find(|function| function.name == name).unwrap()
}

#[test]
fn kernels_as_they_should_be_pass_on_every_architecture() {
    for listing in [SM_80, SM_100A] {
        for (name, shared) in [("linear_gemv_rows", 0), ("linear_gemm_tile", 512)] {
            let found = judge(TABLE, &kernel(name, shared), &function(listing, name));
            assert_eq!(found, Vec::<String>::new(), "{name}");
        }
    }
}

#[test]
fn a_matrix_kernel_without_tensor_cores_is_told_what_it_lacks() {
    for listing in [SM_80, SM_100A] {
        let listing = listing.replace("HMMA.16816.F32.BF16", "FFMA");
        let found = judge(TABLE, &kernel("linear_gemm_tile", 512), &function(&listing, "linear_gemm_tile"));
        assert_eq!(found, ["it holds no HMMA.16816.F32.BF16"]);
    }
}

#[test]
fn a_memory_bound_kernel_without_wide_loads_is_told_what_it_lacks() {
    let listing = SM_80.replace("LDG.E.NA.128.CONSTANT", "LDG.E.64.CONSTANT");
    let found = judge(TABLE, &kernel("linear_gemv_rows", 0), &function(&listing, "linear_gemv_rows"));
    assert_eq!(found, ["it holds no LDG.128 and no LDGSTS.128"]);
}

#[test]
fn a_narrow_load_beside_wide_ones_is_found_in_the_loop() {
    for listing in [SM_80, SM_100A] {
        let function = function(listing, "linear_gemv_scaled");
        let found = judge(TABLE, &kernel("linear_gemv_scaled", 0), &function);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("a loop that loads 16 bytes at a time also holds LDG.E"), "{found:?}");
        let allowed = [memory_bound(TEXT, "linear_gemv_*", NarrowLoads::Allowed)];
        assert_eq!(judge(&allowed, &kernel("linear_gemv_scaled", 0), &function), Vec::<String>::new());
    }
}

#[test]
fn local_memory_is_refused_in_every_kernel() {
    let listing = SM_80.replace("LDG.E.NA.128.CONSTANT", "LDL.64");
    let found = judge(&[], &kernel("any_name", 0), &function(&listing, "linear_gemv_rows"));
    assert_eq!(found, ["it holds LDL: local memory"]);
}

#[test]
fn shared_memory_is_declared_where_it_is_used_and_only_there() {
    let found = judge(TABLE, &kernel("linear_gemm_tile", 0), &function(SM_80, "linear_gemm_tile"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("`// dynamic shared memory: linear_gemm_tile BYTES bytes`"), "{found:?}");
    let found = judge(TABLE, &kernel("linear_gemv_rows", 512), &function(SM_80, "linear_gemv_rows"));
    assert_eq!(found, ["its text says that it is launched with 512 bytes of shared memory; it uses none"]);
}

#[test]
fn a_rule_without_a_kernel_is_an_error_once_its_text_is_there() {
    let source = Source { name: TEXT, text: "", headers: &[] };
    let kernels = [kernel("linear_gemv_rows", 0)];
    let found = without_kernels(TABLE, &[source], &kernels);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("linear_gemm_* of linear/kernel.cu, which holds no such kernel"), "{found:?}");
    assert_eq!(without_kernels(TABLE, &[], &[]), Vec::<String>::new());
}

#[test]
fn the_table_s_rules_are_in_order_and_one_for_each_family() {
    let keys: Vec<(&str, &str)> = RULES.iter().map(|rule| (rule.text, rule.kernels)).collect();
    let mut sorted = keys.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!(keys, sorted);
}
