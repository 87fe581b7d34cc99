//! What crosses to a rank's process has the bytes of bincode with fixed integers, for ever: held against bincode itself
//! over a second writing-down of every type.

mod mirror;
mod values;

use consort_actors::plan::{StepPlan, StepResult};
use proptest::prelude::*;

fn wire<T: wincode::Serialize<Src = T>>(value: &T) -> Vec<u8> {
    wincode::serialize(value).expect("plans and results are short")
}

fn of_bincode(value: &impl bincode::Encode) -> Vec<u8> {
    bincode::encode_to_vec(value, bincode::config::legacy()).expect("plans and results can be written")
}

proptest! {
    #[test]
    fn plans_have_the_bytes_of_bincode_and_come_back(plan in values::plan()) {
        let bytes = wire(&plan);
        prop_assert_eq!(&bytes, &of_bincode(&mirror::StepPlan::from(&plan)));
        prop_assert_eq!(wincode::deserialize_exact::<StepPlan>(&bytes).expect("they were written"), plan);
    }

    #[test]
    fn results_have_the_bytes_of_bincode_and_come_back(result in values::result()) {
        let bytes = wire(&result);
        prop_assert_eq!(&bytes, &of_bincode(&mirror::StepResult::from(&result)));
        prop_assert_eq!(wincode::deserialize_exact::<StepResult>(&bytes).expect("they were written"), result);
    }

    #[test]
    fn a_plan_that_was_cut_short_is_an_error(plan in values::plan(), keep in 0.0..1.0_f64) {
        let bytes = wire(&plan);
        let keep = (bytes.len() as f64 * keep) as usize;
        prop_assert!(wincode::deserialize_exact::<StepPlan>(&bytes[..keep]).is_err());
    }

    #[test]
    fn a_damaged_plan_is_an_error_or_a_plan(
        plan in values::plan(), at in any::<prop::sample::Index>(), to in any::<u8>(),
    ) {
        let mut bytes = wire(&plan);
        let at = at.index(bytes.len());
        bytes[at] = to;
        let _ = wincode::deserialize_exact::<StepPlan>(&bytes);
    }

    #[test]
    fn any_bytes_are_an_error_or_a_result(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = wincode::deserialize_exact::<StepResult>(&bytes);
    }
}

#[test]
fn a_list_that_claims_more_than_there_is_takes_no_memory_for_it() {
    // Epoch and step, then a list of as many sequences as 64 bits can say.
    let mut bytes = vec![0; 16];
    bytes.extend([0xff; 8]);
    let error = wincode::deserialize_exact::<StepPlan>(&bytes).expect_err("there is nothing behind it");
    assert!(error.to_string().contains("preallocation limit"), "{error}");
}

#[test]
fn trailing_bytes_are_an_error() {
    let plan = values::empty_plan();
    let mut bytes = wire(&plan);
    bytes.push(0);
    assert!(wincode::deserialize_exact::<StepPlan>(&bytes).is_err());
}
