use half::f16;

use super::Encoding;

const QUANTISED: [Encoding; 8] = [
    Encoding::Q4_0,
    Encoding::Q4_1,
    Encoding::Q5_0,
    Encoding::Q5_1,
    Encoding::Q8_0,
    Encoding::Q4K,
    Encoding::Q5K,
    Encoding::Q6K,
];

/// A row of two blocks whose bytes all differ from their neighbours, under the scale 0.5 and, where there is one, the
/// minimum 0.25.
fn row(encoding: Encoding) -> Vec<u8> {
    let (_, bytes) = encoding.block();
    let mut row: Vec<u8> = (0..2 * bytes).map(|at| (at * 151 + 7) as u8).collect();
    for block in row.chunks_exact_mut(bytes) {
        with_scales(encoding, block, f16::from_f32(0.5), f16::from_f32(0.25));
    }
    row
}

fn with_scales(encoding: Encoding, block: &mut [u8], scale: f16, minimum: f16) {
    match encoding {
        Encoding::Q6K => block[208..].copy_from_slice(&scale.to_le_bytes()),
        _ => block[..2].copy_from_slice(&scale.to_le_bytes()),
    }
    if has_minimum(encoding) {
        block[2..4].copy_from_slice(&minimum.to_le_bytes());
    }
}

fn has_minimum(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::Q4_1 | Encoding::Q5_1 | Encoding::Q4K | Encoding::Q5K)
}

fn decode(encoding: Encoding, row: &[u8], cols: std::ops::Range<usize>) -> Vec<u32> {
    let mut out = vec![f32::NAN; cols.len()];
    encoding.decode(row, cols, &mut out);
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn columns_need_not_start_or_end_where_blocks_do() {
    for encoding in QUANTISED {
        let row = row(encoding);
        let cols = 2 * encoding.block().0;
        let whole = decode(encoding, &row, 0..cols);
        for start in 0..=cols {
            for end in (start..=cols).filter(|end| cols == 64 || (start + end) % 7 == 0) {
                assert_eq!(
                    decode(encoding, &row, start..end),
                    whole[start..end],
                    "{encoding} {start}..{end}"
                );
            }
        }
    }
}

#[test]
fn rows_are_whole_blocks() {
    for encoding in QUANTISED {
        let (elements, bytes) = encoding.block();
        assert_eq!(encoding.row_bytes(3 * elements), Some(3 * bytes), "{encoding}");
        assert_eq!(encoding.row_bytes(0), Some(0));
        for cols in [1, elements - 1, elements + 1, elements / 2] {
            assert_eq!(encoding.row_bytes(cols), None, "{encoding} {cols}");
        }
    }
    assert_eq!(Encoding::F32.row_bytes(usize::MAX), None);
    assert_eq!(Encoding::Q8_0.row_bytes(usize::MAX - 31), None, "more bytes than there are addresses");
}

#[test]
fn any_scale_gives_what_arithmetic_makes_of_it() {
    let scales = [0x0001, 0x8001, 0x03ff, 0x0000, 0x8000, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x7c01];
    for encoding in QUANTISED {
        let (elements, bytes) = encoding.block();
        for (scale, minimum) in scales.iter().flat_map(|scale| scales.map(|minimum| (*scale, minimum))) {
            let mut block = row(encoding)[..bytes].to_vec();
            let (scale, minimum) = (f16::from_bits(scale), f16::from_bits(minimum));
            let minimum = if has_minimum(encoding) { minimum } else { f16::ZERO };
            with_scales(encoding, &mut block, scale, minimum);
            let mut values = vec![0.0; elements];
            encoding.decode(&block, 0..elements, &mut values);
            if scale.is_nan() {
                assert!(values.iter().all(|value| value.is_nan()), "{encoding} {scale}");
            } else if scale.is_finite() && minimum.is_finite() {
                assert!(values.iter().all(|value| value.is_finite()), "{encoding} {scale} {minimum}");
            } else {
                assert!(values.iter().any(|value| !value.is_finite()), "{encoding} {scale} {minimum}");
            }
        }
    }
}

#[test]
fn a_scale_is_multiplied_with_the_distance_from_the_middle() {
    let decode = |scale: f16| {
        let mut block = [0x88; 18];
        block[..2].copy_from_slice(&scale.to_le_bytes());
        (block[2], block[3]) = (0xf0, 0x90);
        let mut values = [0.0; 32];
        Encoding::Q4_0.decode(&block, 0..32, &mut values);
        [values[0], values[16], values[17], values[2]]
    };
    // The numbers 0, 15, 9 and 8 are stored.
    assert_eq!(decode(f16::from_f32(-2.0)), [16.0, -14.0, -2.0, 0.0]);
    let least = 2.0_f32.powi(-24);
    assert_eq!(decode(f16::from_bits(1)), [-8.0 * least, 7.0 * least, least, 0.0]);
    let [low, high, near, middle] = decode(f16::INFINITY);
    assert_eq!([low, high, near], [f32::NEG_INFINITY, f32::INFINITY, f32::INFINITY]);
    assert!(middle.is_nan(), "infinity times zero");
    assert!(decode(f16::NAN).iter().all(|value| value.is_nan()));
}
