use super::*;

#[test]
fn every_member_runs_every_job_once() {
    let team = Team::new(4).unwrap();
    for _ in 0..2000 {
        let hits = [const { AtomicUsize::new(0) }; 4];
        team.run(&|me| {
            hits[me.index].fetch_add(1, Relaxed);
        });
        assert!(hits.iter().all(|hit| hit.load(Relaxed) == 1));
    }
}

#[test]
fn a_sleeping_team_wakes_for_the_next_job() {
    let team = Team::new(3).unwrap();
    for _ in 0..3 {
        std::thread::sleep(std::time::Duration::from_millis(30));
        let sum = AtomicUsize::new(0);
        team.for_each(100, |item| {
            sum.fetch_add(item, Relaxed);
        });
        assert_eq!(sum.load(Relaxed), 4950);
    }
}

#[test]
fn a_members_panic_reaches_the_caller_and_the_team_survives() {
    let team = Team::new(2).unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| {
        team.run(&|me| assert_eq!(me.index, 0, "planted"));
    }));
    assert!(panic.is_err());
    let panic = catch_unwind(AssertUnwindSafe(|| team.run(&|_| panic!("planted on both"))));
    assert!(panic.is_err());
    let sum = AtomicUsize::new(0);
    team.run(&|me| {
        sum.fetch_add(me.index + 1, Relaxed);
    });
    assert_eq!(sum.load(Relaxed), 3);
}

#[test]
fn parts_cover_everything_once() {
    for items in [0, 1, 2, 7, 64] {
        for size in 1..6 {
            let covered: Vec<usize> =
                (0..size).flat_map(|index| Member { index, size }.part(items)).collect();
            assert_eq!(covered, (0..items).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_team_without_threads_or_with_absurdly_many_is_refused() {
    assert!(Team::new(0).is_err());
    assert!(Team::new(1_000_000).is_err());
}
