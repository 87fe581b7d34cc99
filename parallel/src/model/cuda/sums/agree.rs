//! What all ranks of a group have to sum with. They find it out together, so that none decides for itself.

use std::sync::Arc;

use consort_kernels::{
    all_reduce::cuda::NoWay,
    cuda::{
        nccl::{Nccl, NcclError, UniqueId},
        settings::Settings,
    },
};

use super::super::{
    super::{AllReduce, ModelError},
    group::refusal,
};
use crate::collective::Collective;

/// What is wanted of sums over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Wishes {
    pub(in super::super) all_reduce: AllReduce,
    /// Whether bits must depend on nothing but what is added.
    pub(in super::super) deterministic: bool,
}

/// What the ranks of a group will sum with: the same on all of them.
pub(in super::super) struct Agreement {
    /// Our kernels, for which every device reaches every other's memory.
    pub(in super::super) kernels: bool,
    /// NCCL, which every rank has, and the id of their communicator.
    pub(super) nccl: Option<(Arc<Nccl>, UniqueId)>,
    pub(super) deterministic: bool,
}

/// What a rank tells of itself.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Offer {
    /// Whether its device reaches the memory of all others.
    reaches: bool,
    nccl: bool,
    /// Of rank 0, if it has NCCL.
    id: Option<UniqueId>,
}

const ID_BYTES: usize = 128;

/// Agrees with the other ranks. `reaches`: whether this rank's device reaches all others' memory.
pub(in super::super) fn agree(
    comm: &mut dyn Collective,
    wishes: Wishes,
    reaches: bool,
) -> Result<Agreement, ModelError> {
    let (library, id, lack) = match open(wishes, comm.rank().0 == 0) {
        Ok(Some((library, id))) => (Some(library), id, None),
        Ok(None) => (None, None, None),
        Err(error) if wishes.all_reduce == AllReduce::Nccl => {
            return Err(consort_kernels::KernelError::from(error).into());
        }
        Err(error) => (None, None, Some(error)),
    };
    let mine = Offer { reaches, nccl: library.is_some(), id };
    let offers = comm.exchange(&mine.to_bytes())?;
    let offers = offers.iter().map(|bytes| Offer::of_bytes(bytes)).collect::<Option<Vec<_>>>();
    let offers = offers.ok_or_else(|| refusal("a rank offered something else".to_owned()))?;
    let (kernels, id) = wishes.settle(&offers)?;
    if let (true, None, Some(lack)) = (kernels, id, &lack) {
        tracing::debug!(%lack, "ranks sum without NCCL");
    }
    Ok(Agreement { kernels, nccl: library.zip(id), deterministic: wishes.deterministic })
}

/// The library, and on the first rank the id of a new group.
type Opened = (Arc<Nccl>, Option<UniqueId>);

/// NCCL; `None` where it is not wanted.
fn open(wishes: Wishes, is_first: bool) -> Result<Option<Opened>, NcclError> {
    if wishes.deterministic || wishes.all_reduce == AllReduce::Kernels {
        return Ok(None);
    }
    let library = Nccl::open(&Settings::of_process())?;
    let id = is_first.then(|| library.unique_id()).transpose()?;
    Ok(Some((library, id)))
}

impl Wishes {
    /// Whether our kernels sum, and the id under which ranks meet through NCCL, if they do.
    fn settle(self, offers: &[Offer]) -> Result<(bool, Option<UniqueId>), ModelError> {
        let reaches = offers.iter().all(|offer| offer.reaches);
        let kernels = reaches && self.all_reduce != AllReduce::Nccl;
        let id = offers.first().and_then(|first| first.id).filter(|_| offers.iter().all(|offer| offer.nccl));
        if kernels || id.is_some() {
            return Ok((kernels, id));
        }
        let ranks = offers.len();
        let no_way = match self {
            Wishes { all_reduce: AllReduce::Kernels, .. } => {
                return Err(refusal(format!(
                    "{ranks} ranks cannot sum by kernels: their devices cannot reach each other's memory. Choose \
                     devices that can, or have them sum through NCCL: all_reduce = \"auto\""
                )));
            }
            Wishes { deterministic: true, .. } => NoWay::NotDeterministic { ranks },
            _ => NoWay::Nothing { ranks },
        };
        Err(refusal(no_way.to_string()))
    }
}

impl Offer {
    fn to_bytes(self) -> Vec<u8> {
        let flags = u8::from(self.reaches) | u8::from(self.nccl) << 1;
        let id = self.id.map(UniqueId::to_bytes);
        [flags].into_iter().chain(id.into_iter().flatten()).collect()
    }

    fn of_bytes(bytes: &[u8]) -> Option<Offer> {
        let (&flags, id) = bytes.split_first()?;
        let id = match id {
            [] => None,
            id => Some(UniqueId::of_bytes(<[u8; ID_BYTES]>::try_from(id).ok()?)),
        };
        (flags < 4).then_some(Offer { reaches: flags & 1 != 0, nccl: flags & 2 != 0, id })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: Option<UniqueId> = None;

    fn some_id() -> Option<UniqueId> {
        Some(UniqueId::of_bytes(std::array::from_fn(|at| at as u8)))
    }

    fn wishes(all_reduce: AllReduce, deterministic: bool) -> Wishes {
        Wishes { all_reduce, deterministic }
    }

    /// Offers of three ranks, whose last is as said.
    fn offers(reaches: bool, nccl: bool, id: Option<UniqueId>) -> Vec<Offer> {
        let others = Offer { reaches: true, nccl: id.is_some(), id: None };
        vec![Offer { id, ..others }, others, Offer { reaches, nccl, id: None }]
    }

    #[test]
    fn ranks_understand_each_others_offers_and_nothing_else() {
        for offer in offers(false, true, some_id()) {
            let bytes = offer.to_bytes();
            assert_eq!(Offer::of_bytes(&bytes), Some(offer));
            assert_eq!(Offer::of_bytes(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(Offer::of_bytes(&[]), None);
        assert_eq!(Offer::of_bytes(&[4]), None);
    }

    #[test]
    fn ranks_sum_with_what_all_have_and_what_is_wanted() {
        let settle =
            |wishes: Wishes, offers: &[Offer]| wishes.settle(offers).map_err(|error| error.to_string());
        let auto = wishes(AllReduce::Auto, false);
        let id = some_id();
        assert_eq!(settle(auto, &offers(true, true, id)), Ok((true, id)));
        assert_eq!(settle(auto, &offers(true, false, id)), Ok((true, ID)), "one has no NCCL");
        assert_eq!(settle(auto, &offers(false, true, id)), Ok((false, id)), "one reaches nobody");
        assert_eq!(settle(wishes(AllReduce::Nccl, false), &offers(true, true, id)), Ok((false, id)));
        assert_eq!(settle(wishes(AllReduce::Kernels, false), &offers(true, false, None)), Ok((true, ID)));
        let nothing = settle(auto, &offers(false, false, id)).unwrap_err();
        assert!(nothing.contains("pip install nvidia-nccl-cu12"), "{nothing}");
        let kernels = settle(wishes(AllReduce::Kernels, false), &offers(false, false, None)).unwrap_err();
        assert!(kernels.contains("all_reduce = \"auto\""), "{kernels}");
        let deterministic = settle(wishes(AllReduce::Auto, true), &offers(false, false, None)).unwrap_err();
        assert!(deterministic.contains("needs devices that reach each other's memory"), "{deterministic}");
    }
}
