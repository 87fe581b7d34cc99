use std::sync::Mutex;

use super::*;

/// Element `at` of matrix `matrix`.
fn value(matrix: usize, at: usize) -> bf16 {
    bf16::from_f32(((matrix * 37 + at * 11) % 251) as f32 - 125.0)
}

#[test]
fn software_driver_many_chunks_of_many_threads_arrive_whole() {
    in_every_order(
        module_path!(),
        "software_driver_many_chunks_of_many_threads_arrive_whole",
        &[],
        |settings| {
            let device = open(settings, "cuda:0");
            let shapes = [(300, 96), (1, 2000), (77, 13), (0, 8), (513, 64)];
            let mut plan = ArenaPlan::new();
            let places: Vec<_> = shapes
                .iter()
                .map(|&(rows, width)| plan.reserve::<bf16>(rows * row_stride(width), "weight"))
                .collect();
            let vector = plan.reserve::<f32>(5000, "norm");
            let arena = plan.allocate(&device).unwrap();
            let mut places: Vec<_> = places.into_iter().map(|place| arena.buffer(place)).collect();
            let mut vector = arena.buffer(vector);
            let fill = |matrix: usize, width: usize| {
                move |rows: std::ops::Range<usize>, out: &mut [bf16]| -> Result<(), String> {
                    for (row, out) in rows.zip(out.chunks_exact_mut(row_stride(width))) {
                        (0..width).for_each(|column| out[column] = value(matrix, row * width + column));
                    }
                    Ok(())
                }
            };
            for threads in [1, 3] {
                let mut uploader = Uploader::new(&device, threads, 4096).unwrap();
                let mut uploads = Vec::new();
                for (matrix, (place, &(_, width))) in places.iter_mut().zip(&shapes).enumerate() {
                    uploads
                        .push(Upload::new(place.all_mut(), row_stride(width), fill(matrix, width)).unwrap());
                }
                let ones = |rows: std::ops::Range<usize>, out: &mut [f32]| {
                    rows.zip(out).for_each(|(row, out)| *out = row as f32);
                    Ok(())
                };
                uploads.push(Upload::new(vector.all_mut(), 1, ones).unwrap());
                let seen = Mutex::new(Vec::new());
                uploader.run(&uploads, &|progress| seen.lock().unwrap().push(progress)).unwrap();
                drop(uploads);
                let mut seen = seen.into_inner().unwrap();
                seen.sort_by_key(|progress| progress.done_bytes);
                let last = seen.last().unwrap();
                assert!(seen.len() > 20 && last.done_bytes == last.total_bytes, "{last:?}");
                for (matrix, (place, &(rows, width))) in places.iter().zip(&shapes).enumerate() {
                    let got = read(&device, place);
                    for (row, got) in got.chunks_exact(row_stride(width)).enumerate().take(rows) {
                        let expected = (0..width).map(|column| value(matrix, row * width + column));
                        assert!(
                            expected.eq(got[..width].iter().copied()),
                            "{threads} threads, {matrix}, row {row}"
                        );
                        assert!(got[width..].iter().all(|x| x.to_bits() == 0), "padding is zero");
                    }
                }
                assert!(read(&device, &vector).iter().zip(0u32..).all(|(got, i)| *got == i as f32));
                places.iter_mut().for_each(|place| device.zero(place.all_mut()).unwrap());
            }
        },
    );
}

#[test]
fn software_driver_the_first_error_ends_an_upload_and_the_next_one_works() {
    over_driver(
        module_path!(),
        "software_driver_the_first_error_ends_an_upload_and_the_next_one_works",
        &[],
        |settings| {
            let device = open(settings, "cuda:0");
            let mut plan = ArenaPlan::new();
            let place = plan.reserve::<f32>(100_000, "weight");
            let mut place = plan.allocate(&device).unwrap().buffer(place);
            let mut uploader = Uploader::new(&device, 2, 4096).unwrap();
            let fails = |rows: std::ops::Range<usize>, _: &mut [f32]| {
                if rows.contains(&50_000) { Err(format!("row {} is missing", rows.start)) } else { Ok(()) }
            };
            let uploads = [Upload::new(place.all_mut(), 1, fails).unwrap()];
            let error = uploader.run(&uploads, &|_| {}).unwrap_err();
            assert!(matches!(&error, UploadError::Fill(reason) if reason.ends_with("is missing")), "{error}");
            drop(uploads);
            let works = |_: std::ops::Range<usize>, out: &mut [f32]| {
                out.fill(3.0);
                Ok::<(), String>(())
            };
            uploader.run(&[Upload::new(place.all_mut(), 1, works).unwrap()], &|_| {}).unwrap();
            assert!(read(&device, &place).iter().all(|&x| x == 3.0));
            let wide = [Upload::new(place.all_mut(), 100_000, works).unwrap()];
            assert!(matches!(
                uploader.run(&wide, &|_| {}),
                Err(UploadError::Device(KernelError::Unsupported { .. }))
            ));
            drop(wide);
            assert!(Upload::new(place.all_mut(), 3, works).is_err(), "no whole rows");
        },
    );
}
