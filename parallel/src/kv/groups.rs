//! Which layers' keys and values share a page.
//!
//! Layers of equal windows are divided into groups of equally many layers. A page holds some tokens of all layers of
//! one group, so a sequence has one block table for each group, and pages that no layer of a group will look at again
//! can go to others. Pages of all groups are equally large and come from one pool: a layer's place is its group, whose
//! table it reads, and its slot within that group's pages. Where the layers of a window do not fill their last group,
//! its pages have slots that nobody uses.

use std::num::NonZeroUsize;

use crate::config::ModelConfig;

/// Most groups: tables of all are walked for every sequence.
pub const KV_GROUPS_MAX: usize = 16;

/// Slots that no layer uses, at most one for so many layers.
const LAYERS_PER_UNUSED_SLOT: usize = 10;

/// Where the pages of a layer are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlace {
    /// The group whose block tables name the layer's pages.
    pub group: usize,
    /// The layer's part of such a page.
    pub slot: usize,
}

/// The layers of a model as the pool of pages sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGroups {
    layers_per_page: usize,
    /// Of each group.
    windows: Vec<Option<NonZeroUsize>>,
    /// Of each layer.
    places: Vec<KvPlace>,
}

impl KvGroups {
    /// Divides the layers of `config`: into as few groups as leave at most one slot unused for ten layers, and with as
    /// few unused slots as so many groups allow. Where that would be more than [`KV_GROUPS_MAX`], into as many of them
    /// as leave the fewest slots unused.
    pub fn of(config: &ModelConfig) -> KvGroups {
        KvGroups::of_windows(&config.layer_windows)
    }

    /// The same for layers of which nothing else is known.
    pub fn of_windows(layer_windows: &[Option<NonZeroUsize>]) -> KvGroups {
        let classes = classes(layer_windows);
        let layers_per_page = layers_per_page(&classes, layer_windows.len());
        let (mut windows, mut places) =
            (Vec::new(), vec![KvPlace { group: 0, slot: 0 }; layer_windows.len()]);
        for Class { window, layers } in &classes {
            for layers in layers.chunks(layers_per_page) {
                let group = windows.len();
                layers.iter().enumerate().for_each(|(slot, &layer)| places[layer] = KvPlace { group, slot });
                windows.push(*window);
            }
        }
        KvGroups { layers_per_page, windows, places }
    }

    /// Layers that a page has room for.
    pub fn layers_per_page(&self) -> usize {
        self.layers_per_page
    }

    /// Groups, and block tables of a sequence.
    pub fn count(&self) -> usize {
        self.windows.len()
    }

    /// Of each group the keys that a token sees in its layers, its own included; `None` for all.
    pub fn windows(&self) -> impl ExactSizeIterator<Item = Option<usize>> + '_ {
        self.windows.iter().map(|window| window.map(NonZeroUsize::get))
    }

    /// Where each layer's pages are found.
    pub fn places(&self) -> &[KvPlace] {
        &self.places
    }
}

/// Layers that look equally far back.
struct Class {
    window: Option<NonZeroUsize>,
    layers: Vec<usize>,
}

/// In the order of their first layers.
fn classes(layer_windows: &[Option<NonZeroUsize>]) -> Vec<Class> {
    let mut classes: Vec<Class> = Vec::new();
    for (layer, &window) in layer_windows.iter().enumerate() {
        match classes.iter_mut().find(|class| class.window == window) {
            Some(class) => class.layers.push(layer),
            None => classes.push(Class { window, layers: vec![layer] }),
        }
    }
    if classes.len() <= KV_GROUPS_MAX {
        return classes;
    }
    // A page may be kept for longer than a layer looks at it, never for less.
    let farthest =
        layer_windows.iter().copied().max_by_key(|window| window.map_or(usize::MAX, NonZeroUsize::get));
    vec![Class { window: farthest.flatten(), layers: (0..layer_windows.len()).collect() }]
}

fn layers_per_page(classes: &[Class], layers: usize) -> usize {
    let largest = classes.iter().map(|class| class.layers.len()).max().unwrap_or(0);
    let choices = (1..=largest).map(|size| {
        let groups: usize = classes.iter().map(|class| class.layers.len().div_ceil(size)).sum();
        (size, groups, groups * size - layers)
    });
    let possible = choices.filter(|(_, groups, _)| *groups <= KV_GROUPS_MAX);
    let best = possible.min_by_key(|&(_, groups, unused)| {
        let is_tight = unused * LAYERS_PER_UNUSED_SLOT <= layers;
        if is_tight { (false, groups, unused) } else { (true, unused, groups) }
    });
    best.map_or(1, |(size, _, _)| size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers a page, and the windows of all groups.
    fn divided(layers: &[usize]) -> (usize, Vec<usize>) {
        let windows: Vec<Option<NonZeroUsize>> = layers.iter().copied().map(NonZeroUsize::new).collect();
        let groups = KvGroups::of_windows(&windows);
        assert_sound(&groups, &windows);
        (groups.layers_per_page(), groups.windows().map(|window| window.unwrap_or(0)).collect())
    }

    /// Each slot of a group's page belongs to at most one layer, and no page is given away before its layers are done.
    fn assert_sound(groups: &KvGroups, windows: &[Option<NonZeroUsize>]) {
        assert!(groups.count() <= KV_GROUPS_MAX);
        assert_eq!((groups.windows().len(), groups.places().len()), (groups.count(), windows.len()));
        let mut used = vec![vec![0; groups.layers_per_page()]; groups.count()];
        let of_groups: Vec<Option<usize>> = groups.windows().collect();
        for (place, window) in groups.places().iter().zip(windows) {
            used[place.group][place.slot] += 1;
            let kept = of_groups[place.group].unwrap_or(usize::MAX);
            assert!(kept >= window.map_or(usize::MAX, NonZeroUsize::get));
        }
        assert!(used.iter().flatten().all(|layers| *layers <= 1));
        assert!(used.iter().all(|group| group[0] == 1), "no group without layers");
    }

    fn times(count: usize, windows: &[usize]) -> Vec<usize> {
        windows.iter().copied().cycle().take(count).collect()
    }

    #[test]
    fn layers_that_are_all_alike_are_one_group() {
        assert_eq!(divided(&[0]), (1, vec![0]));
        assert_eq!(divided(&times(80, &[0])), (80, vec![0]));
        assert_eq!(divided(&times(32, &[4096])), (32, vec![4096]));
        assert_eq!(divided(&[]), (1, vec![]));
    }

    #[test]
    fn alternating_layers_are_two_groups_without_an_unused_slot() {
        assert_eq!(divided(&times(36, &[128, 0])), (18, vec![128, 0]), "gpt-oss-120b");
        assert_eq!(divided(&times(24, &[128, 0])), (12, vec![128, 0]), "gpt-oss-20b");
        assert_eq!(divided(&times(35, &[128, 0])), (18, vec![128, 0]), "an odd number of layers");
    }

    #[test]
    fn five_windows_to_one_full_layer_fill_their_pages_but_for_a_tenth() {
        // 52 windows and 10 full layers in 5 pages of 13: three slots are unused.
        assert_eq!(
            divided(&times(62, &[1024, 1024, 1024, 1024, 1024, 0])),
            (13, vec![1024, 1024, 1024, 1024, 0])
        );
        // 29 and 5 layers: 6 pages of 6 would leave two slots of 34 unused, 35 slots in pages of 5 one.
        assert_eq!(divided(&times(34, &[512, 512, 512, 512, 512, 0])), (6, vec![512, 512, 512, 512, 512, 0]));
        assert_eq!(divided(&times(48, &[4096, 4096, 4096, 0])), (12, vec![4096, 4096, 4096, 0]));
    }

    #[test]
    fn of_equally_many_groups_those_with_fewer_unused_slots_are_taken() {
        // 20 and 10 layers: three pages of 11 would do as well, and be larger.
        assert_eq!(divided(&times(30, &[64, 64, 0])), (10, vec![64, 64, 0]));
    }

    #[test]
    fn one_odd_layer_does_not_take_a_page_of_all() {
        let mut layers = times(40, &[0]);
        layers.push(64);
        // 9 pages of 5: four slots of 45 are unused.
        let (layers_per_page, windows) = divided(&layers);
        assert_eq!((layers_per_page, windows), (5, [vec![0; 8], vec![64]].concat()));
        // Nothing wastes less than a tenth in 16 groups: what wastes least, in the fewest groups.
        let mut layers = times(31, &[0]);
        layers.push(64);
        assert_eq!(divided(&layers), (4, [vec![0; 8], vec![64]].concat()));
    }

    #[test]
    fn more_windows_than_groups_share_the_widest() {
        let windows: Vec<usize> = (1..=17).collect();
        assert_eq!(divided(&windows), (17, vec![17]));
        let windows: Vec<usize> = (0..17).collect();
        assert_eq!(divided(&windows), (17, vec![0]));
        let windows: Vec<usize> = (1..=16).collect();
        assert_eq!(divided(&windows), (1, windows.clone()));
    }

    #[test]
    fn every_mixture_is_divided_soundly() {
        for layers in 1..=100 {
            for full_every in 1..=layers {
                let windows: Vec<usize> =
                    (0..layers).map(|layer| if layer % full_every == 0 { 0 } else { 128 }).collect();
                divided(&windows);
            }
        }
    }
}
