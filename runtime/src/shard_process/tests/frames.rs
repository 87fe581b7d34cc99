//! Frames that are damaged, too long or of another version.

use bytes::{BufMut, BytesMut};
use consort_actors::{Epoch, Step, plan::StepResult};
use proptest::prelude::*;

use super::super::frame::{FRAME_BYTES_MAX, FrameError, PROTOCOL, ToParent, ToShard, codec, decode, encode};

fn result() -> ToParent {
    let (epoch, step) = (Epoch(3), Step(17));
    ToParent::Result(StepResult { epoch, step, outputs: Vec::new(), transferred: None, digest: 7 })
}

#[test]
fn a_message_comes_back_from_pieces_of_its_frame() {
    let frame = encode(&mut codec(), &result()).expect("it is short");
    let (mut reader, mut received) = (codec(), BytesMut::new());
    for (at, byte) in frame.iter().enumerate() {
        received.put_u8(*byte);
        let message = decode::<ToParent>(&mut reader, &mut received).expect("no damage");
        assert_eq!(message, (at + 1 == frame.len()).then(result));
    }
    assert!(received.is_empty());
}

#[test]
fn a_length_beyond_the_largest_frame_is_refused_before_it_is_allocated() {
    let mut received = BytesMut::new();
    received.put_u32(FRAME_BYTES_MAX as u32 + 1);
    let error = decode::<ToShard>(&mut codec(), &mut received).expect_err("too long");
    assert!(matches!(error, FrameError::Framing(_)), "{error}");
    assert!(received.capacity() < 1 << 16, "{} bytes", received.capacity());
}

#[test]
fn a_message_beyond_the_largest_frame_is_refused_by_its_sender() {
    let error = "x".repeat(FRAME_BYTES_MAX);
    let outcome = encode(&mut codec(), &ToParent::Failed { error });
    assert!(outcome.is_err());
}

#[test]
fn a_frame_of_another_version_is_refused_as_that() {
    let mut frame = BytesMut::from(&encode(&mut codec(), &result()).expect("it is short")[..]);
    frame[4] = PROTOCOL + 1;
    let error = decode::<ToParent>(&mut codec(), &mut frame).expect_err("another version");
    assert!(matches!(error, FrameError::Version { got } if got == PROTOCOL + 1), "{error}");
}

proptest! {
    #[test]
    fn damaged_frames_are_errors_or_messages_and_never_a_panic(
        at in 4_usize..40, bit in 0_u8..8, keep in 0_usize..60,
    ) {
        let frame = encode(&mut codec(), &result()).expect("it is short");
        let mut damaged = BytesMut::from(&frame[..]);
        let at = at.min(damaged.len() - 1);
        damaged[at] ^= 1 << bit;
        let _ = decode::<ToParent>(&mut codec(), &mut damaged);
        // Cut short, with a length that says so.
        let payload = &frame[4..frame.len().min(4 + keep)];
        let mut cut = BytesMut::new();
        cut.put_u32(payload.len() as u32);
        cut.put_slice(payload);
        let outcome = decode::<ToParent>(&mut codec(), &mut cut);
        prop_assert!(outcome.is_err() || payload.len() + 4 == frame.len());
    }

    #[test]
    fn any_bytes_in_a_frame_are_errors_or_messages(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut frame = BytesMut::new();
        frame.put_u32(bytes.len() as u32 + 1);
        frame.put_u8(PROTOCOL);
        frame.put_slice(&bytes);
        let _ = decode::<ToShard>(&mut codec(), &mut frame);
    }
}
