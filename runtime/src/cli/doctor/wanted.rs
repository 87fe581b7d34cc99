//! The devices that somebody asks for, held against those that are there.

use std::str::FromStr;

use serde::Serialize;

use super::{
    facts::{Card, Driver, Facts},
    report::Gap,
};
use crate::topology::{CudaCard, DeviceSpec};

/// What the command line may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum WantedDevice {
    /// `cuda`: at least one card that can be used.
    AnyCard,
    /// As a topology names it.
    Named(DeviceSpec),
}

impl FromStr for WantedDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<WantedDevice, String> {
        if text.trim() == "cuda" {
            return Ok(WantedDevice::AnyCard);
        }
        let named = DeviceSpec::parse(text).map(WantedDevice::Named);
        named.map_err(|(problem, remedy)| format!("{problem}; {remedy}"))
    }
}

/// One device that is asked for.
pub(super) struct Asked {
    device: WantedDevice,
    /// Of a topology; its ranks share nothing.
    rank: Option<usize>,
    /// Of a topology with several.
    replica: Option<usize>,
}

impl Asked {
    pub(super) fn flag(device: WantedDevice) -> Asked {
        Asked { device, rank: None, replica: None }
    }

    pub(super) fn rank(rank: usize, device: DeviceSpec) -> Asked {
        Asked { device: WantedDevice::Named(device), rank: Some(rank), replica: None }
    }

    pub(super) fn rank_of(replica: usize, rank: usize, device: DeviceSpec) -> Asked {
        Asked { replica: Some(replica), ..Asked::rank(rank, device) }
    }

    fn name(&self) -> String {
        match self.device {
            WantedDevice::AnyCard => "cuda".to_owned(),
            WantedDevice::Named(device) => device.to_string(),
        }
    }
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Verdict {
    pub(super) devices: Vec<Answer>,
    #[serde(skip)]
    pub(super) gaps: Vec<Gap>,
}

/// What came of one device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Answer {
    pub(super) device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) replica: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<usize>,
    pub(super) is_usable: bool,
    /// The card that is meant, where one is.
    pub(super) card: Option<u32>,
}

impl Verdict {
    /// Devices that cannot be used, each once.
    pub(super) fn unusable(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for answer in self.devices.iter().filter(|answer| !answer.is_usable) {
            if !names.contains(&answer.device) {
                names.push(answer.device.clone());
            }
        }
        names
    }
}

/// Which of the devices can be used, and what to do about the others.
pub(super) fn judge(asked: &[Asked], facts: &Facts) -> Verdict {
    let mut verdict = Verdict { devices: Vec::new(), gaps: Vec::new() };
    for one in asked {
        let (card, gap) = match find(one.device, facts) {
            Ok(card) => (card, None),
            Err(gap) => (None, Some(gap)),
        };
        let answer = Answer {
            device: one.name(),
            replica: one.replica,
            rank: one.rank,
            is_usable: gap.is_none(),
            card: card.map(|c| c.ordinal),
        };
        verdict.devices.push(answer);
        verdict.gaps.extend(gap.filter(|gap| !verdict.gaps.contains(gap)));
    }
    company(&mut verdict, facts);
    verdict
}

/// The card that is meant, if it is a card at all.
fn find(device: WantedDevice, facts: &Facts) -> Result<Option<&Card>, Gap> {
    let card = match device {
        WantedDevice::Named(DeviceSpec::Cpu(_)) => return Ok(None),
        _ if !matches!(facts.driver, Driver::Found { .. }) => {
            return Err(gap(
                "no card can be used without the driver",
                "see the driver above, or use \"cpu\"",
            ));
        }
        WantedDevice::AnyCard => {
            return match facts.usable_cards().next() {
                Some(card) => Ok(Some(card)),
                None => Err(gap("no card can be used", "see the cards above, or use \"cpu\"")),
            };
        }
        WantedDevice::Named(DeviceSpec::Cuda(CudaCard::Index(index))) => {
            facts.cards.iter().find(|card| card.ordinal == u32::from(index))
        }
        WantedDevice::Named(DeviceSpec::Cuda(CudaCard::Uuid(uuid))) => {
            facts.cards.iter().find(|card| card.uuid == uuid.to_string())
        }
    };
    let name = Asked::flag(device).name();
    let Some(card) = card else {
        let there: Vec<String> = facts.cards.iter().map(Card::label).collect();
        let remedy = format!("there are {}; CUDA_VISIBLE_DEVICES has a say in it", there.join(", "));
        return Err(gap(format!("{name} is not there"), remedy));
    };
    match card.hindrance() {
        Some(hindrance) => {
            Err(gap(format!("{name} cannot be used: {hindrance}"), "see the cards above, or use another"))
        }
        None => Ok(Some(card)),
    }
}

/// Ranks need a card each, and those of one replica read each other's memory.
fn company(verdict: &mut Verdict, facts: &Facts) {
    let mut refused: Vec<(usize, Gap)> = Vec::new();
    let ranks = || verdict.devices.iter().enumerate().filter(|(_, answer)| answer.rank.is_some());
    for (at, one) in ranks() {
        let Some(to) = one.card else { continue };
        for (_, before) in ranks().take_while(|(before, _)| *before < at) {
            let Some(from) = before.card else { continue };
            if from == to {
                let what = format!("{} and {} are one card", before.device, one.device);
                refused.push((at, gap(what, "name another: each rank needs its own")));
            } else if one.replica == before.replica && !are_peers(from, to, facts) {
                let what = format!("{} and {} cannot read each other's memory", before.device, one.device);
                refused.push((
                    at,
                    gap(what, "ranks of one model must: see the links above, or use other cards"),
                ));
            }
        }
    }
    for (at, gap) in refused {
        verdict.devices[at].is_usable = false;
        verdict.gaps.push(gap);
    }
}

fn are_peers(one: u32, other: u32, facts: &Facts) -> bool {
    let reaches = |from, to| facts.links.iter().any(|l| (l.from, l.to) == (from, to) && l.peer_access);
    reaches(one, other) && reaches(other, one)
}

fn gap(what: impl Into<String>, remedy: impl Into<String>) -> Gap {
    Gap { about: "asked", what: what.into(), remedy: remedy.into() }
}
