//! A kernel's parameters, packed as `cuLaunchKernel` wants them.

use std::ffi::c_void;

use super::{DeviceSlice, DeviceSliceMut};

/// Parameters in order. Each starts on eight bytes of its own, so that a pointer to it is aligned.
#[derive(Clone, Debug, Default)]
pub struct Args {
    words: Vec<u64>,
    /// First word and bytes of each parameter.
    places: Vec<(usize, usize)>,
}

impl Args {
    /// None yet.
    pub fn new() -> Args {
        Args::default()
    }

    /// A pointer to elements that the kernel reads.
    pub fn slice<T>(self, slice: DeviceSlice<'_, T>) -> Args {
        self.u64(slice.address())
    }

    /// A pointer to elements that the kernel writes.
    pub fn slice_mut<T>(self, slice: &mut DeviceSliceMut<'_, T>) -> Args {
        self.u64(slice.address())
    }

    /// A pointer that may be null.
    pub fn optional<T>(self, slice: Option<DeviceSlice<'_, T>>) -> Args {
        self.u64(slice.map_or(0, |slice| slice.address()))
    }

    /// `u64`, or an address.
    pub fn u64(self, value: u64) -> Args {
        self.bytes(&value.to_ne_bytes())
    }

    /// `u32`.
    pub fn u32(self, value: u32) -> Args {
        self.bytes(&value.to_ne_bytes())
    }

    /// `float`.
    pub fn f32(self, value: f32) -> Args {
        self.bytes(&value.to_ne_bytes())
    }

    /// A structure passed by value: its bytes, padding included.
    pub fn bytes(mut self, bytes: &[u8]) -> Args {
        self.places.push((self.words.len(), bytes.len()));
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.words.push(u64::from_ne_bytes(word));
        }
        self
    }

    /// Bytes of each parameter.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        self.places.iter().map(|&(_, bytes)| bytes)
    }

    /// A pointer to each parameter, valid as long as `self`. Nobody writes through them.
    pub fn pointers(&self) -> Vec<*mut c_void> {
        self.places
            .iter()
            .map(|&(word, _)| std::ptr::from_ref(&self.words[word]).cast_mut().cast::<c_void>())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::Args;

    #[test]
    fn parameters_keep_their_order_sizes_and_bytes() {
        let args = Args::new().u32(7).f32(1.5).u64(u64::MAX).bytes(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!(args.sizes().collect::<Vec<_>>(), [4, 4, 8, 12]);
        assert_eq!(args.words[0].to_ne_bytes()[..4], 7u32.to_ne_bytes());
        assert_eq!(args.words[1].to_ne_bytes()[..4], 1.5f32.to_ne_bytes());
        assert_eq!(args.words[2], u64::MAX);
        assert_eq!(args.words[4].to_ne_bytes(), [9, 10, 11, 12, 0, 0, 0, 0]);
        let pointers = args.pointers();
        assert!(pointers.iter().all(|pointer| pointer.align_offset(8) == 0));
        assert_eq!(pointers[3] as usize - pointers[0] as usize, 24);
    }
}
