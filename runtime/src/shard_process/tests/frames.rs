//! Frames that are damaged, too long or of another version.

use std::{os::fd::OwnedFd, sync::Arc};

use bytes::{BufMut, BytesMut};
use consort_actors::{Epoch, Step, plan::StepResult};
use proptest::prelude::*;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::super::{
    frame::{FRAME_BYTES_MAX, FrameError, PROTOCOL, ToParent, ToShard, codec, decode, encode},
    socket::{DESCRIPTORS_MAX, FrameReader, FrameWriter, Received, Wait},
};

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

#[test]
fn as_many_descriptors_come_with_a_frame_as_went_with_it() {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).expect("sockets");
    let (mut writer, mut reader) = (FrameWriter::new(Arc::new(ours)), FrameReader::new(Arc::new(theirs)));
    let files = |count: usize| -> Vec<OwnedFd> {
        (0..count).map(|_| std::fs::File::open("/dev/null").expect("it is there").into()).collect()
    };
    let rejoin = |count: usize| ToShard::Rejoin { epoch: Epoch(count as u64), descriptors: count as u8 };
    // One behind the other, before any is looked at.
    for count in [DESCRIPTORS_MAX, 0, 1, DESCRIPTORS_MAX - 1] {
        writer.push(&rejoin(count), files(count)).expect("no more than there may be");
    }
    assert!(writer.flush(Wait::Forever).expect("there is room"));
    for count in [DESCRIPTORS_MAX, 0, 1, DESCRIPTORS_MAX - 1] {
        let message = loop {
            if let Some(message) = reader.message::<ToShard>().expect("no damage") {
                break message;
            }
            assert_eq!(reader.fill(Wait::Never).expect("no more than may wait"), Received::Bytes);
        };
        assert_eq!(message, rejoin(count));
        assert!(reader.descriptors(u8::MAX).is_none(), "no message has so many");
        assert_eq!(reader.descriptors(count as u8).map(|all| all.len()), Some(count));
    }
    assert!(reader.descriptors(1).is_none(), "none is left");
    let refused = writer.push(&rejoin(DESCRIPTORS_MAX + 1), files(DESCRIPTORS_MAX + 1));
    assert!(matches!(refused, Err(FrameError::Descriptors)), "{refused:?}");
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
