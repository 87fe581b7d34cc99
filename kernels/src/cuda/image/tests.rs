use std::path::Path;

use super::*;
use crate::{
    cuda::{arch::Arch, cubins::Cubins, sources::SOURCES, testing},
    testing::Numbers,
};

const MIXED_12: &[u8] = include_bytes!("mixed_12_9_sm_80.cubin");
const MIXED_13: &[u8] = include_bytes!("mixed_13_5_sm_100a.cubin");
const LARGE: &[u8] = include_bytes!("large_12_9_sm_90a.cubin");
const ALL: [&[u8]; 3] = [MIXED_12, MIXED_13, LARGE];

fn parameters(kernel: &Kernel) -> Vec<(u32, u32)> {
    kernel.parameters.iter().map(|parameter| (parameter.offset, parameter.bytes)).collect()
}

#[test]
fn parameters_are_where_the_rules_of_c_put_them() {
    for cubin in [MIXED_12, MIXED_13] {
        let kernels = kernels(cubin).unwrap();
        assert_eq!(
            kernels.iter().map(|kernel| kernel.name.as_str()).collect::<Vec<_>>(),
            ["mixed", "without_parameters"]
        );
        // (char, float*, short, struct of three ints, double)
        assert_eq!(parameters(&kernels[0]), [(0, 1), (8, 8), (16, 2), (20, 12), (32, 8)]);
        assert_eq!(kernels[1].parameters, []);
    }
}

#[test]
fn parameters_beyond_four_kilobytes_have_attributes_of_their_own() {
    let kernels = kernels(LARGE).unwrap();
    assert_eq!(kernels[0].name, "large");
    assert_eq!(parameters(&kernels[0]), [(0, 8000), (8000, 8), (8008, 2)]);
}

#[test]
fn launch_bounds_registers_and_frames_are_told() {
    for cubin in [MIXED_12, MIXED_13] {
        let kernels = kernels(cubin).unwrap();
        assert_eq!(kernels.iter().map(|kernel| kernel.threads_max).collect::<Vec<_>>(), [Some(96), Some(32)]);
        assert!(kernels.iter().all(|kernel| (4..=32).contains(&kernel.registers) && kernel.frame_bytes == 0));
    }
    assert_eq!(kernels(LARGE).unwrap()[1].threads_max, None, "a kernel without launch bounds");
}

#[test]
fn what_is_no_cubin_is_refused() {
    assert!(kernels(b"").is_err());
    assert!(kernels(b"{\"not\": \"a cubin\"}").is_err());
    let mut other_machine = MIXED_12.to_vec();
    other_machine[18] = 62;
    let error = kernels(&other_machine).expect_err("x86-64").to_string();
    assert!(error.contains("another machine"), "{error}");
}

#[test]
fn a_cubin_cut_anywhere_is_refused_and_never_panics() {
    for cubin in ALL {
        for end in 0..cubin.len() {
            // The program headers at its end are not read.
            let _ = kernels(&cubin[..end]);
        }
        assert!(kernels(&cubin[..cubin.len() / 2]).is_err());
    }
}

#[test]
fn damaged_cubins_never_panic() {
    let mut numbers = Numbers(7);
    for cubin in ALL {
        for _ in 0..3_000 {
            let mut damaged = cubin.to_vec();
            for _ in 0..1 + numbers.below(8) {
                let at = numbers.below(damaged.len());
                damaged[at] = [0, 1, 0x7f, 0xff, numbers.next_u64() as u8][numbers.below(5)];
            }
            let _ = kernels(&damaged);
        }
    }
}

/// The emulator knows a kernel's parameters from its C++ signature, the cubin from NVRTC's: a launch that one of them
/// takes must be right for the other.
#[test]
fn emulator_and_cubins_agree_on_every_kernel_its_parameters_and_its_largest_block() {
    let Some(mut settings) = testing::nvrtc_settings() else { return };
    settings.cache = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/cubin-cache"));
    let cubins = Cubins::new(settings);
    let mut compiled: Vec<(String, Vec<u32>, u32)> = Vec::new();
    for source in SOURCES {
        let cubin = cubins.compiled(source, Arch::CHECKED[0]).unwrap();
        compiled.extend(kernels(&cubin.bytes).unwrap().into_iter().map(|kernel| {
            let bytes = kernel.parameters.iter().map(|parameter| parameter.bytes).collect();
            (kernel.name, bytes, kernel.threads_max.expect("KERNEL declares it"))
        }));
    }
    compiled.sort();
    let emulated: Vec<(String, Vec<u32>, u32)> = consort_emulator::kernels()
        .into_iter()
        .map(|(name, bytes, threads)| (name.to_owned(), bytes.to_vec(), threads))
        .collect();
    assert_eq!(compiled, emulated);
}
