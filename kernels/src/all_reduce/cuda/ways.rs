//! Which way a sum goes: fixed for each size when a group begins, so that no rank ever chooses by itself.

use super::prefers_one_shot;

/// How the ranks' parts are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// [`all_reduce_one_shot`](super::all_reduce_one_shot).
    OneShot,
    /// [`all_reduce_two_shot`](super::all_reduce_two_shot).
    TwoShots,
    /// [`NcclCommunicator::all_reduce`](crate::cuda::nccl::NcclCommunicator::all_reduce).
    Nccl,
}

/// What a group has and wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Means {
    /// Ranks.
    pub ranks: usize,
    /// Elements up to which our kernels may sum: those of the ranks' buffers. Zero where the ranks cannot reach each
    /// other's memory.
    pub kernels_max: usize,
    /// Whether all ranks have a communicator of NCCL.
    pub nccl: bool,
    /// Whether the bits of a sum must depend on nothing but its parts, which NCCL does not promise.
    pub deterministic: bool,
}

/// How long sums of one size took in each way that was tried, on the slowest rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Elements of f32.
    pub elements: usize,
    /// By [`Way::OneShot`].
    pub one_shot_us: Option<f32>,
    /// By [`Way::TwoShots`].
    pub two_shots_us: Option<f32>,
    /// By [`Way::Nccl`].
    pub nccl_us: Option<f32>,
}

/// The way of every size. All ranks of a group have the same: it is made of what they agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WayTable {
    /// Up to how many elements a way goes, ascending, the last one for all sizes beyond.
    rows: Vec<(usize, Way)>,
    means: Means,
}

/// Why there is no table: some size could be summed in no way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWay {
    /// Nothing to sum with.
    #[error(
        "{ranks} ranks have no way to sum on their devices: these cannot reach each other's memory, and there is no \
         NCCL. Install NCCL (`pip install nvidia-nccl-cu12`), or choose devices that reach each other"
    )]
    Nothing {
        /// Ranks.
        ranks: usize,
    },
    /// Only NCCL, whose sums may not be used.
    #[error(
        "{ranks} ranks can sum through NCCL only, whose bits may depend on the size: a deterministic group needs \
         devices that reach each other's memory"
    )]
    NotDeterministic {
        /// Ranks.
        ranks: usize,
    },
}

impl WayTable {
    /// By rule: our kernels as far as they go, since they take one launch and sum in rank order, and NCCL beyond.
    pub fn by_rule(means: Means) -> Result<WayTable, NoWay> {
        let last = means.last()?;
        let mut rows = Vec::new();
        if means.kernels_max > 0 {
            let one_shot_max = one_shot_max(means.ranks, means.kernels_max);
            if one_shot_max > 0 {
                rows.push((one_shot_max, Way::OneShot));
            }
            if one_shot_max < means.kernels_max {
                rows.push((means.kernels_max, Way::TwoShots));
            }
        }
        match last {
            Way::Nccl => rows.push((usize::MAX, last)),
            // Buffers end there, and so do sums.
            _ => {
                if let Some(row) = rows.last_mut() {
                    row.0 = usize::MAX;
                }
            }
        }
        Ok(WayTable { rows, means })
    }

    /// By what was measured: each size goes the way that was fastest for the smallest size measured that is as large,
    /// and sizes beyond all of those go the way of the largest. Ways that the group has not are left out, and where
    /// none is left for a size the rule decides. Sizes may come in any order.
    pub fn measured(means: Means, timings: &[Timing]) -> Result<WayTable, NoWay> {
        let rule = WayTable::by_rule(means)?;
        let mut timings = timings.to_vec();
        timings.sort_by_key(|timing| timing.elements);
        let mut rows: Vec<(usize, Way)> = Vec::new();
        for timing in &timings {
            let way = timing.fastest(&means).unwrap_or_else(|| rule.way(timing.elements));
            match rows.last_mut() {
                Some(last) if last.1 == way || last.0 == timing.elements => last.0 = timing.elements,
                _ => rows.push((timing.elements, way)),
            }
        }
        let Some(&(measured_max, way)) = rows.last() else { return Ok(rule) };
        // Our kernels go no further than their buffers.
        match way {
            Way::Nccl => rows.push((usize::MAX, way)),
            _ if measured_max < means.kernels_max => rows.push((means.kernels_max, way)),
            _ => {}
        }
        rows.extend(rule.rows.into_iter().filter(|&(max, _)| max > means.kernels_max.max(measured_max)));
        rows.dedup_by(|next, row| {
            let same = next.1 == row.1;
            if same {
                row.0 = row.0.max(next.0);
            }
            same
        });
        Ok(WayTable { rows, means })
    }

    /// The way of a sum of so many elements.
    pub fn way(&self, elements: usize) -> Way {
        let row = self.rows.iter().find(|(max, _)| elements <= *max).or(self.rows.last());
        row.map_or(Way::OneShot, |&(_, way)| way)
    }

    /// Up to how many elements each way goes, ascending; the last one goes for all sizes beyond.
    pub fn rows(&self) -> &[(usize, Way)] {
        &self.rows
    }

    /// What it was made for.
    pub fn means(&self) -> &Means {
        &self.means
    }
}

impl Means {
    /// The way of the largest sums.
    fn last(&self) -> Result<Way, NoWay> {
        let ranks = self.ranks;
        match (self.kernels_max > 0, self.nccl, self.deterministic) {
            (_, true, false) => Ok(Way::Nccl),
            (true, ..) => Ok(Way::TwoShots),
            (false, true, true) => Err(NoWay::NotDeterministic { ranks }),
            (false, false, _) => Err(NoWay::Nothing { ranks }),
        }
    }

    fn allow(&self, way: Way, elements: usize) -> bool {
        match way {
            Way::OneShot | Way::TwoShots => elements <= self.kernels_max,
            Way::Nccl => self.nccl && !self.deterministic,
        }
    }
}

impl Timing {
    /// Slowest of all ranks' timings of the same sizes, in order: a sum is done when the last rank has it. A way that a
    /// rank has not tried, or that took no number of microseconds, nobody has.
    pub fn slowest(ranks: &[Vec<Timing>]) -> Vec<Timing> {
        let Some((first, others)) = ranks.split_first() else { return Vec::new() };
        let worse = |a: Option<f32>, b: Option<f32>| Some(a?.max(b?));
        let mut slowest = Vec::new();
        for (at, timing) in first.iter().enumerate() {
            let mut timing = *timing;
            for other in others {
                let same = other.get(at).filter(|other| other.elements == timing.elements);
                timing.one_shot_us = worse(timing.one_shot_us, same.and_then(|other| other.one_shot_us));
                timing.two_shots_us = worse(timing.two_shots_us, same.and_then(|other| other.two_shots_us));
                timing.nccl_us = worse(timing.nccl_us, same.and_then(|other| other.nccl_us));
            }
            slowest.push(timing);
        }
        slowest
    }

    /// The first of the fastest ways that the group has.
    fn fastest(&self, means: &Means) -> Option<Way> {
        let tried =
            [(Way::OneShot, self.one_shot_us), (Way::TwoShots, self.two_shots_us), (Way::Nccl, self.nccl_us)];
        tried
            .into_iter()
            .filter(|&(way, us)| {
                means.allow(way, self.elements) && us.is_some_and(|us| us.is_finite() && us >= 0.0)
            })
            .min_by(|(_, a), (_, b)| a.unwrap_or(f32::MAX).total_cmp(&b.unwrap_or(f32::MAX)))
            .map(|(way, _)| way)
    }
}

/// The largest sum up to `limit` for which one shot is expected to be faster.
fn one_shot_max(ranks: usize, limit: usize) -> usize {
    if prefers_one_shot(limit, ranks) {
        return limit;
    }
    // What is preferred for a size is preferred for all smaller ones.
    let (mut preferred, mut not) = (0, limit);
    while not - preferred > 1 {
        let middle = preferred + (not - preferred) / 2;
        if prefers_one_shot(middle, ranks) { preferred = middle } else { not = middle }
    }
    preferred
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUFFER: usize = 4_000_000;
    const ALL: Means = Means { ranks: 3, kernels_max: BUFFER, nccl: true, deterministic: false };

    #[test]
    fn by_rule_kernels_go_as_far_as_their_buffers_and_nccl_beyond() {
        let table = WayTable::by_rule(ALL).unwrap();
        for elements in [0, 1, 400_000, 430_000, BUFFER] {
            let kernel = if prefers_one_shot(elements, 3) { Way::OneShot } else { Way::TwoShots };
            assert_eq!(table.way(elements), kernel, "{elements}");
        }
        assert_eq!([table.way(BUFFER + 1), table.way(usize::MAX)], [Way::Nccl; 2]);
        // One shot is all there is for two ranks.
        let two = WayTable::by_rule(Means { ranks: 2, ..ALL }).unwrap();
        assert_eq!(two.rows(), [(BUFFER, Way::OneShot), (usize::MAX, Way::Nccl)]);
        let small = WayTable::by_rule(Means { kernels_max: 100, ..ALL }).unwrap();
        assert_eq!(small.rows(), [(100, Way::OneShot), (usize::MAX, Way::Nccl)]);
    }

    #[test]
    fn the_rule_s_border_is_that_of_the_kernels_own_choice() {
        for ranks in 2..=16 {
            let table = WayTable::by_rule(Means { ranks, ..ALL }).unwrap();
            let (border, way) = table.rows()[0];
            assert_eq!(way, Way::OneShot, "{ranks}");
            assert!(prefers_one_shot(border, ranks), "{ranks}");
            assert!(border == BUFFER || !prefers_one_shot(border + 1, ranks), "{ranks}: {border}");
        }
    }

    #[test]
    fn a_deterministic_group_never_sums_through_nccl() {
        let means = Means { deterministic: true, ..ALL };
        let fast_nccl = |elements| Timing {
            elements,
            one_shot_us: Some(50.0),
            two_shots_us: Some(40.0),
            nccl_us: Some(1.0),
        };
        let timings = [fast_nccl(1000), fast_nccl(BUFFER), fast_nccl(2 * BUFFER)];
        for table in [WayTable::by_rule(means), WayTable::measured(means, &timings)] {
            let table = table.unwrap();
            assert!(table.rows().iter().all(|(_, way)| *way != Way::Nccl), "{table:?}");
            assert_eq!(table.rows().last().unwrap().0, usize::MAX);
        }
        let apart = Means { kernels_max: 0, ..means };
        assert_eq!(WayTable::by_rule(apart), Err(NoWay::NotDeterministic { ranks: 3 }));
    }

    #[test]
    fn without_any_way_there_is_no_table_and_without_kernels_all_goes_through_nccl() {
        let alone = Means { kernels_max: 0, nccl: false, ..ALL };
        let error = WayTable::measured(alone, &[]).unwrap_err();
        assert!(error.to_string().contains("pip install nvidia-nccl-cu12"), "{error}");
        let table = WayTable::by_rule(Means { kernels_max: 0, ..ALL }).unwrap();
        assert_eq!(table.rows(), [(usize::MAX, Way::Nccl)]);
    }

    #[test]
    fn each_size_goes_the_way_that_was_fastest_for_the_next_size_measured() {
        let timing = |elements, one_shot, two_shots, nccl| Timing {
            elements,
            one_shot_us: Some(one_shot),
            two_shots_us: Some(two_shots),
            nccl_us: Some(nccl),
        };
        let timings = [
            timing(1_000_000, 90.0, 60.0, 55.0),
            timing(1_000, 5.0, 9.0, 15.0),
            timing(100_000, 20.0, 18.0, 22.0),
            timing(10_000, 6.0, 10.0, 15.0),
        ];
        let table = WayTable::measured(ALL, &timings).unwrap();
        let expected = [(10_000, Way::OneShot), (100_000, Way::TwoShots), (usize::MAX, Way::Nccl)];
        assert_eq!(table.rows(), expected);
        let order = |elements| [table.way(elements), table.way(elements + 1)];
        assert_eq!(order(10_000), [Way::OneShot, Way::TwoShots]);
        assert_eq!(order(100_000), [Way::TwoShots, Way::Nccl]);
        // Without NCCL the largest ones go as the largest measured does.
        let means = Means { nccl: false, ..ALL };
        let table = WayTable::measured(means, &timings).unwrap();
        assert_eq!(table.rows(), [(10_000, Way::OneShot), (usize::MAX, Way::TwoShots)]);
    }

    #[test]
    fn what_was_not_measured_or_is_no_number_leaves_the_size_to_the_rule() {
        let nothing =
            Timing { elements: 500, one_shot_us: None, two_shots_us: Some(f32::NAN), nccl_us: None };
        let table = WayTable::measured(ALL, &[nothing]).unwrap();
        assert_eq!(table.way(500), WayTable::by_rule(ALL).unwrap().way(500));
        assert_eq!(table.way(BUFFER + 1), Way::Nccl);
    }

    #[test]
    fn ranks_agree_on_the_slowest_and_on_ways_that_all_have() {
        let timing =
            |one_shot_us, nccl_us| Timing { elements: 64, one_shot_us, two_shots_us: Some(8.0), nccl_us };
        let ranks = [
            vec![timing(Some(4.0), Some(9.0))],
            vec![timing(Some(7.0), None)],
            vec![timing(Some(5.0), Some(8.0))],
        ];
        assert_eq!(Timing::slowest(&ranks), [timing(Some(7.0), None)]);
        assert_eq!(Timing::slowest(&[]), []);
        let short = [ranks[0].clone(), Vec::new()];
        assert_eq!(Timing::slowest(&short)[0].one_shot_us, None);
    }
}
