//! Steps that are begun while the device computes another.

use consort_parallel::model::{Model, RowOutcome, STEPS_UNDER_WAY_MAX, drawn_by};

use super::*;

const DECODES: usize = 6;

/// A rank's model and pages.
struct Seat<'a> {
    model: Box<dyn Model>,
    kv: KvStore,
    comm: &'a mut dyn Collective,
    sampling: Vec<SamplingParams>,
    histories: Vec<TokenHistory>,
    vocabulary: usize,
}

/// `sequences` of lengths from one to four tokens, each with one page.
fn place(comm: &mut dyn Collective, width: usize, sequences: usize, step_limit: Duration) -> Seat<'_> {
    let checkpoint = open("tiny_llama");
    let partition = Partition::new(checkpoint.config(), width, None).unwrap();
    let (rank, vocabulary) = (comm.rank(), checkpoint.config().vocab_size);
    let options =
        LoadOptions { max_batch_tokens: 256, max_num_seqs: 80, deterministic: true, step_limit, ..options() };
    let device = Setup { place: INVARIANT, ..Setup::new(width, DType::BF16, 256) }.device(rank);
    let mut model = load(&device, &checkpoint, &partition, rank, &options, &|_, _| {}).unwrap();
    model.join(comm).unwrap();
    let layout = kv_layout(checkpoint.config(), partition.share(rank), DType::BF16, BLOCK_SIZE).unwrap();
    let kv = KvStore::new(&device, layout, sequences).unwrap();
    let sampling: Vec<SamplingParams> = (0..sequences)
        .map(|at| SamplingParams { adjustments: Adjustments::default(), ..asked(at, vocabulary) })
        .collect();
    let histories = sampling.iter().map(|params| TokenHistory::new(1, &params.adjustments)).collect();
    Seat { model, kv, comm, sampling, histories, vocabulary }
}

fn length(at: usize) -> usize {
    1 + at % 4
}

/// Draws of all sequences in a step, the first of which is 0.
fn requests<'a>(
    sampling: &'a [SamplingParams],
    histories: &'a [TokenHistory],
    step: usize,
) -> Vec<RowRequest<'a>> {
    let rows = sampling.iter().zip(histories).enumerate();
    rows.map(|(at, (sampling, history))| RowRequest {
        prompt: None,
        draw: Some(Draw { sampling, history, position: (length(at) + step) as u64, logprobs: None }),
    })
    .collect()
}

impl Seat<'_> {
    /// Prompts of all sequences.
    fn prompts(&self) -> Batch {
        let mut batch = Batch::new(1);
        for at in 0..self.sampling.len() {
            let first = batch.tokens.len();
            batch
                .tokens
                .extend((0..length(at)).map(|token| ((at * 31 + token * 7) % self.vocabulary) as u32));
            batch.positions.extend(0..length(at) as u32);
            let rows = first..batch.tokens.len();
            batch.output_rows.push(rows.end - 1);
            batch.tables[0].push(BlockId(at as u32));
            batch.spans.push(BatchSpan { rows, context_len: length(at), table: at..at + 1 });
        }
        batch
    }

    /// The `decode`-th decode, from 1 on, of these tokens.
    fn decode(&self, decode: usize, tokens: Vec<u32>) -> Batch {
        let sequences = tokens.len();
        Batch {
            positions: (0..sequences).map(|at| (length(at) + decode - 1) as u32).collect(),
            spans: (0..sequences)
                .map(|at| BatchSpan { rows: at..at + 1, context_len: length(at) + decode, table: at..at + 1 })
                .collect(),
            tables: vec![(0..sequences as u32).map(BlockId).collect()],
            output_rows: (0..sequences).collect(),
            tokens,
        }
    }

    /// All steps, one by one.
    fn one_by_one(&mut self) -> Vec<Vec<u32>> {
        let (mut all, mut batch) = (Vec::new(), self.prompts());
        for step in 0..=DECODES {
            self.model.forward(&batch, &mut self.kv, self.comm).unwrap();
            let requests = requests(&self.sampling, &self.histories, step);
            all.push(tokens(self.model.outcomes(&requests, false, self.comm).unwrap()));
            batch = self.decode(step + 1, all[step].clone());
        }
        all
    }

    fn begin(&mut self, batch: &Batch, step: usize) -> Result<(), ModelError> {
        let Seat { model, kv, comm, sampling, histories, .. } = self;
        let requests = requests(sampling, histories, step);
        let overlap = model.overlap().expect("a device computes beside the host");
        assert!(overlap.takes(&requests));
        overlap.begin(batch, &requests, kv, *comm)
    }

    fn finish(&mut self) -> Vec<u32> {
        loop {
            let overlap = self.model.overlap().unwrap();
            if let Some(outcomes) = overlap.finish(Duration::from_millis(5), self.comm).unwrap() {
                return tokens(outcomes);
            }
        }
    }

    /// All steps, each begun while the one before it is under way.
    fn beside_each_other(&mut self) -> Vec<Vec<u32>> {
        let prompts = self.prompts();
        self.begin(&prompts, 0).unwrap();
        let mut all = Vec::new();
        for step in 1..=DECODES {
            let batch = self.decode(step, (0..self.sampling.len()).map(drawn_by).collect());
            self.begin(&batch, step).unwrap();
            all.push(self.finish());
        }
        all.push(self.finish());
        all
    }
}

fn tokens(outcomes: Vec<RowOutcome>) -> Vec<u32> {
    outcomes.into_iter().map(|row| row.drawn.unwrap().token.unwrap()).collect()
}

fn same_beside_and_one_by_one(width: usize, sequences: usize) {
    std::thread::scope(|scope| {
        for mut comm in LocalGroup::new(width) {
            scope.spawn(move || {
                let mut place = place(&mut comm, width, sequences, STEP_LIMIT);
                let expected = place.one_by_one();
                assert_eq!(place.beside_each_other(), expected);
                // And again over the same graphs, which were all made by now.
                assert_eq!(place.beside_each_other(), expected);
                // A rank that leaves ends the group.
                place.comm.barrier().unwrap();
            });
        }
    });
}

#[test]
fn software_driver_steps_begun_beside_each_other_draw_what_they_draw_one_by_one() {
    for (order, width, sequences) in
        [("lazy", 1, 3), ("eager", 3, 5), ("random:1", 3, 5), ("random:2", 1, 70)]
    {
        let test = "software_driver::overlap::\
                    software_driver_steps_begun_beside_each_other_draw_what_they_draw_one_by_one";
        let (width_text, sequences_text) = (width.to_string(), sequences.to_string());
        let environment = [
            ("CONSORT_SOFTWARE_DRIVER_DEVICES", "3"),
            ("CONSORT_SOFTWARE_DRIVER_ORDER", order),
            ("CONSORT_TEST_WIDTH", width_text.as_str()),
            ("CONSORT_TEST_SEQUENCES", sequences_text.as_str()),
        ];
        let report = in_child_reported(test, &environment, || {
            // The child goes through the same list, and is to take one turn.
            let number = |name: &str| std::env::var(name).unwrap().parse().unwrap();
            same_beside_and_one_by_one(number("CONSORT_TEST_WIDTH"), number("CONSORT_TEST_SEQUENCES"));
        });
        let Some(report) = report else { return };
        assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{order}: {report:?}");
        println!("{order}, {width} ranks, {sequences} sequences: {} graphs behind", report.graphs_behind);
    }
}

#[test]
fn software_driver_steps_out_of_turn_are_refused_and_nothing_is_under_way_after_that() {
    let test = "software_driver::overlap::\
                software_driver_steps_out_of_turn_are_refused_and_nothing_is_under_way_after_that";
    let report = in_child_reported(test, &[], || {
        let mut comm = LocalGroup::new(1).remove(0);
        let mut place = place(&mut comm, 1, 2, STEP_LIMIT);
        let prompts = place.prompts();
        let named = place.decode(1, vec![drawn_by(0), drawn_by(1)]);
        // A token of a step that there is not.
        assert!(matches!(place.begin(&named, 1), Err(ModelError::Batch(_))));
        let refused = place.begin(&prompts, 0).unwrap_err().to_string();
        assert!(refused.contains("after one that failed"), "{refused}");
        let Seat { model, comm, .. } = &mut place;
        model.join(*comm).unwrap();
        for step in 0..STEPS_UNDER_WAY_MAX {
            place.begin(&prompts, step).unwrap();
        }
        let refused = place.begin(&prompts, 2).unwrap_err().to_string();
        assert!(refused.contains("more than the 2 that may be under way"), "{refused}");
        let Seat { model, comm, .. } = &mut place;
        let overlap = model.overlap().unwrap();
        assert!(matches!(overlap.finish(Duration::ZERO, *comm), Err(ModelError::Batch(_))));
        model.join(*comm).unwrap();
        // One under way, and another at once.
        place.begin(&prompts, 0).unwrap();
        let Seat { model, kv, comm, .. } = &mut place;
        let refused = model.forward(&prompts, kv, *comm).unwrap_err().to_string();
        assert!(refused.contains("was not waited for"), "{refused}");
        let first = place.finish();
        assert_eq!(first, place.one_by_one()[0]);
    });
    let Some(report) = report else { return };
    assert_eq!((report.violations, report.leaked_bytes()), (0, 0), "{report:?}");
}

#[test]
fn software_driver_a_step_that_hangs_behind_another_fails_in_its_own_time() {
    let test =
        "software_driver::overlap::software_driver_a_step_that_hangs_behind_another_fails_in_its_own_time";
    let faults = [("CONSORT_SOFTWARE_DRIVER_FAULTS", "cuGraphLaunch:2=hang")];
    let report = in_child_reported(test, &faults, || {
        let mut comm = LocalGroup::new(1).remove(0);
        let mut place = place(&mut comm, 1, 2, Duration::from_secs(2));
        let prompts = place.prompts();
        place.begin(&prompts, 0).unwrap();
        for step in 1..3 {
            let batch = place.decode(step, vec![drawn_by(0), drawn_by(1)]);
            place.begin(&batch, step).unwrap();
            place.finish();
        }
        let started = Instant::now();
        let late = loop {
            let overlap = place.model.overlap().unwrap();
            match overlap.finish(Duration::from_millis(5), place.comm) {
                Ok(Some(outcomes)) => panic!("{outcomes:?} of a step that hangs"),
                Ok(None) => assert!(started.elapsed() < Duration::from_secs(60), "it is never late"),
                Err(error) => break error,
            }
        };
        assert!(matches!(cuda_error(Err(late)), CudaError::Timeout { seconds: 2, .. }));
        assert!(started.elapsed() >= Duration::from_millis(1900));
    });
    assert!(report.is_none_or(|report| report.violations == 0));
}
