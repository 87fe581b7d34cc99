//! Stands in for `amx` on processors that have no tiles: nothing of it is ever called there.

const NEVER: &str = "tiles are used only where this processor has them";

pub(crate) struct Tiles;

impl Tiles {
    pub(crate) unsafe fn configure(_rows: [u8; 8]) -> Tiles {
        unreachable!("{NEVER}")
    }

    pub(crate) unsafe fn configure_widths(_rows: [u8; 8], _bytes: [u16; 8]) -> Tiles {
        unreachable!("{NEVER}")
    }
}

pub(crate) unsafe fn zero<const T: u8>() {
    unreachable!("{NEVER}")
}

pub(crate) unsafe fn load<const T: u8>(_from: *const u8, _stride: usize) {
    unreachable!("{NEVER}")
}

pub(crate) unsafe fn store<const T: u8>(_to: *mut u8, _stride: usize) {
    unreachable!("{NEVER}")
}

pub(crate) unsafe fn multiply<const C: u8, const A: u8, const B: u8>() {
    unreachable!("{NEVER}")
}

pub(crate) fn prefetch_near(_line: *const u8) {}

pub(crate) fn prefetch_far(_line: *const u8) {}
