use super::*;

const SM_80: &str = include_str!("listing_sm_80.txt");
const SM_100A: &str = include_str!("listing_sm_100a.txt");

fn function(listing: &str, name: &str) -> Function {
    parse(listing).unwrap().into_iter().find(|function| function.name == name).unwrap()
}

#[test]
fn a_listing_holds_its_functions_with_their_instructions() {
    for listing in [SM_80, SM_100A] {
        let names: Vec<String> = parse(listing).unwrap().into_iter().map(|function| function.name).collect();
        assert_eq!(names, ["linear_gemm_tile", "linear_gemv_scaled", "linear_gemv_rows"]);
        let gemm = function(listing, "linear_gemm_tile");
        for pattern in ["HMMA.16816.F32.BF16", "LDSM", "LDGSTS.128", "STG"] {
            assert!(gemm.has(pattern), "{pattern}");
        }
        for pattern in ["LDG", "LDG.128", "HMMA.16816.F32.FP16", "LDS", "16816"] {
            assert!(!gemm.has(pattern), "{pattern}");
        }
    }
}

#[test]
fn a_pattern_fits_whatever_other_modifiers_stand_between() {
    let instruction = Instruction::of("/*01a0*/    @!P0 LDG.E.NA.128.CONSTANT R4, [R2.64] ;").unwrap();
    assert_eq!((instruction.address, instruction.opcode.as_str()), (0x1a0, "LDG.E.NA.128.CONSTANT"));
    for pattern in ["LDG", "LDG.128", "LDG.E.128", "LDG.CONSTANT.E"] {
        assert!(instruction.is(pattern), "{pattern}");
    }
    for pattern in ["LD", "LDG.64", "LDG.E.128.STRONG", "E.128", ""] {
        assert!(!instruction.is(pattern), "{pattern}");
    }
}

#[test]
fn the_loop_over_rows_is_found_and_the_final_branch_to_itself_is_none() {
    for listing in [SM_80, SM_100A] {
        let gemv = function(listing, "linear_gemv_rows");
        let loops = gemv.innermost_loops();
        assert_eq!(loops.len(), 1);
        assert!(loops[0].iter().any(|instruction| instruction.is("LDG.128")));
        assert!(loops[0].iter().any(|instruction| instruction.is("STG.128")));
        assert!(loops[0].len() < gemv.instructions.len());
        assert!(function(listing, "linear_gemm_tile").innermost_loops().is_empty());
    }
}

#[test]
fn of_loops_in_loops_the_innermost_count() {
    let listing = "
.text.nested:
.L_x_0:
        /*0000*/                   LDG.E R0, [R2.64] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, [R2.64] ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/               @P1 BRA `(.L_x_0) ;
        /*0040*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0050*/                   EXIT ;
.L_x_3:
        /*0060*/                   BRA `(.L_x_3);
";
    let nested = function(listing, "nested");
    let loops = nested.innermost_loops();
    assert_eq!(loops.len(), 1);
    assert_eq!(loops[0].iter().map(|found| found.opcode.as_str()).collect::<Vec<_>>(), ["LDG.E.128", "BRA"]);
}

#[test]
fn padding_that_is_never_executed_counts_for_nothing() {
    assert_eq!(Instruction::of("/*00c0*/              @!PT LDS RZ, [RZ] ;"), None);
    assert_eq!(Instruction::of("/*0110*/              @!UPT UIADD3 URZ, URZ, URZ, URZ ;"), None);
}

#[test]
fn what_is_no_listing_is_refused() {
    for text in ["", "nvdisasm fatal : something", ".text.empty:\n", SM_80.split_once(".text.").unwrap().0] {
        assert!(parse(text).is_err(), "{text}");
    }
}
