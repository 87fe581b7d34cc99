use super::*;
use crate::cuda::DeviceSliceMut;

const PARTS: usize = 3;
const PART: usize = 40;
const BLOCKS: usize = 5;

/// A number that tells part, page and round.
fn value(part: usize, block: usize, round: usize) -> bf16 {
    bf16::from_f32((100 * round + 10 * part + block) as f32)
}

/// What a pool holds in which block `b` has the numbers of `(block, round)`.
fn contents(of: [(usize, usize); BLOCKS]) -> Vec<bf16> {
    let parts = (0..PARTS).flat_map(|part| of.map(|(block, round)| value(part, block, round)));
    parts.flat_map(|number| [number; PART]).collect()
}

fn pool(device: &Arc<CudaDevice>) -> DeviceBuffer<bf16> {
    let mut plan = ArenaPlan::new();
    let pool = plan.reserve::<bf16>(PARTS * BLOCKS * PART, "pages");
    plan.allocate(device).unwrap().buffer(pool)
}

#[test]
fn software_driver_pages_come_back_from_the_host_whole_while_the_compute_stream_goes_on() {
    let test = "software_driver_pages_come_back_from_the_host_whole_while_the_compute_stream_goes_on";
    in_every_order(module_path!(), test, &[], |settings| {
        let device = open(settings, "cuda:0");
        let mut pool = pool(&device);
        let mut offload = PageOffload::new(&device, 4, PARTS, PART * size_of::<bf16>()).unwrap();
        let first = contents([0, 1, 2, 3, 4].map(|block| (block, 0)));
        device.upload(&first, pool.all_mut()).unwrap();
        // Nobody waits for the upload: the copies come after it.
        offload.transfer(1, &[(1, 3), (4, 0)], &[], pool.all_mut()).unwrap();
        offload.transfer(2, &[(0, 1)], &[], pool.all_mut()).unwrap();
        offload.finish(LIMIT).unwrap();
        assert_eq!(offload.pending().unwrap(), None);
        // What was saved is anybody's now.
        let second = contents([0, 1, 2, 3, 4].map(|block| (block, 1)));
        device.upload(&second, pool.all_mut()).unwrap();
        offload.transfer(7, &[(2, 2)], &[(3, 0), (0, 3)], pool.all_mut()).unwrap();
        // Other pages are written meanwhile.
        for part in 0..PARTS {
            let at = (part * BLOCKS + 1) * PART;
            let fresh = [value(part, 1, 2); PART];
            device.upload(&fresh, pool.slice_mut(at..at + PART)).unwrap();
        }
        let mut asked = 0;
        while let Some(batch) = offload.pending().unwrap() {
            assert_eq!(batch, 7);
            asked += 1;
            assert!(asked < 10_000_000, "the copies are never done");
        }
        assert_eq!(read(&device, &pool), contents([(1, 0), (1, 2), (2, 1), (4, 0), (4, 1)]));
        offload.transfer(8, &[], &[(2, 4), (1, 1)], pool.all_mut()).unwrap();
        // Given back with copies under way.
        drop(offload);
        assert_eq!(read(&device, &pool), contents([(1, 0), (0, 0), (2, 1), (4, 0), (2, 1)]));
    });
}

#[test]
fn software_driver_pages_beyond_either_pool_are_refused() {
    over_driver(module_path!(), "software_driver_pages_beyond_either_pool_are_refused", &[], |settings| {
        let device = open(settings, "cuda:0");
        let mut pool = pool(&device);
        let bytes = PART * size_of::<bf16>();
        assert!(PageOffload::new(&device, 0, PARTS, bytes).is_err());
        assert!(PageOffload::new(&device, usize::MAX, PARTS, bytes).is_err());
        let mut offload = PageOffload::new(&device, 4, PARTS, bytes).unwrap();
        let mut refused =
            |saves: &[(usize, usize)], loads: &[(usize, usize)], pool: DeviceSliceMut<'_, bf16>| {
                let refused = offload.transfer(0, saves, loads, pool).is_err();
                refused && offload.pending().unwrap().is_none()
            };
        assert!(refused(&[(BLOCKS, 0)], &[], pool.all_mut()));
        assert!(refused(&[(0, 4)], &[], pool.all_mut()));
        assert!(refused(&[], &[(4, 0)], pool.all_mut()));
        assert!(refused(&[], &[(0, BLOCKS)], pool.all_mut()));
        assert!(refused(&[(0, 0)], &[], pool.slice_mut(1..2 * PART)));
    });
}
