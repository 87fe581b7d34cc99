//! What keys and values take: pages, groups of layers over one pool, users.

use std::num::NonZeroUsize;

use super::{
    format::KvFormat,
    shape::{Attention, ModelShape},
};
use crate::{kv::KvGroups, partition::Share};

/// Numbers of a head's keys are stored in multiples of this.
const HEAD_MULTIPLE: usize = 16;

/// When pages are taken and given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Each sequence has the pages of the longest from its beginning on, those behind windows left out.
    Reserved,
    /// Pages are taken as a sequence grows, and all are kept.
    Paged,
    /// The same, and pages behind a window are given back.
    WindowsFreed,
}

/// How a model's keys and values lie in pages of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Tokens of a page.
    pub block_size: usize,
    /// Which layers share pages.
    pub groups: KvGroups,
    /// Longest part of a prompt in one step.
    pub chunk: usize,
}

impl CacheShape {
    /// Pages of a sequence of so many tokens that is not in its prompt.
    pub fn pages(&self, tokens: usize, policy: Policy) -> u64 {
        let all = tokens.div_ceil(self.block_size);
        let of_group = |window: Option<usize>| match (policy, window) {
            (Policy::Paged, _) | (_, None) => all as u64,
            (_, Some(window)) => all.min(self.pages_of_window(window)) as u64,
        };
        self.groups.windows().map(of_group).sum()
    }

    /// Pages that a window spans at most, wherever it begins.
    pub fn pages_of_window(&self, window: usize) -> usize {
        window.saturating_sub(1).div_ceil(self.block_size) + 1
    }

    /// Pages of the longest prompt's part that runs: it holds them beside its window until the step is done.
    pub fn chunk_pages(&self, tokens: usize, policy: Policy) -> u64 {
        let windowed = self.groups.windows().flatten().count() as u64;
        match policy {
            Policy::Paged => 0,
            Policy::Reserved | Policy::WindowsFreed => {
                windowed * self.chunk.min(tokens).div_ceil(self.block_size) as u64
            }
        }
    }

    /// Pages without which a sequence of so many tokens cannot run.
    pub fn pages_needed(&self, tokens: usize, policy: Policy) -> u64 {
        let kept = self.pages(tokens, Policy::Paged);
        // A prompt that is shorter than its window and its part together never holds more than itself.
        self.pages(tokens, policy).saturating_add(self.chunk_pages(tokens, policy)).min(kept)
    }

    /// Tokens of the longest sequence that so many pages hold, up to `most`.
    pub fn longest(&self, pages: u64, most: usize, policy: Policy) -> usize {
        let fits = |blocks: usize| self.pages_needed(blocks.saturating_mul(self.block_size), policy) <= pages;
        let (mut fitting, mut failing) = (0, most.div_ceil(self.block_size) + 1);
        while fitting + 1 < failing {
            let middle = fitting + (failing - fitting) / 2;
            if fits(middle) { fitting = middle } else { failing = middle }
        }
        fitting.saturating_mul(self.block_size).min(most)
    }

    /// Sequences of `tokens` that `pages` hold at the same time, where none may be longer than `longest`.
    pub fn users(&self, pages: u64, tokens: usize, longest: usize, policy: Policy) -> u64 {
        let held = if policy == Policy::Reserved { longest } else { tokens };
        if self.pages_needed(held, policy) > pages {
            return 0;
        }
        let one = self.pages(held, policy).max(1);
        (pages.saturating_sub(self.chunk_pages(held, policy)) / one).max(1)
    }

    /// Bytes of a page on a rank.
    pub fn page_bytes(&self, model: &ModelShape, share: &Share, format: KvFormat) -> u64 {
        let tokens = (self.block_size as u64).saturating_mul(self.groups.layers_per_page() as u64);
        tokens.saturating_mul(model.kv_numbers(share.kv_heads.len())).saturating_mul(format.bytes())
    }
}

impl ModelShape {
    /// Numbers of one token in one layer, with so many KV heads.
    pub(super) fn kv_numbers(&self, kv_heads: usize) -> u64 {
        match self.attention {
            Attention::Grouped(grouped) => {
                2 * kv_heads as u64 * grouped.head_dim.next_multiple_of(HEAD_MULTIPLE) as u64
            }
            Attention::Latent(latent) => (latent.latent + latent.rotary) as u64,
        }
    }

    /// KV heads of the undivided model.
    fn kv_heads(&self) -> usize {
        match self.attention {
            Attention::Grouped(grouped) => grouped.kv_heads,
            Attention::Latent(_) => 1,
        }
    }

    /// Bytes of a token's keys and values over all layers of the undivided model.
    pub fn kv_bytes_per_token(&self, format: KvFormat) -> u64 {
        self.layers() as u64 * self.kv_numbers(self.kv_heads()) * format.bytes()
    }

    /// The same of the layers that see everything: what a token costs for as long as its sequence lives.
    pub fn kv_bytes_per_kept_token(&self, format: KvFormat) -> u64 {
        let full = self.windows.iter().filter(|window| window.is_none()).count() as u64;
        full * self.kv_numbers(self.kv_heads()) * format.bytes()
    }

    /// Bytes of a sequence's pages in the layers that have windows, however long it is.
    pub fn kv_bytes_of_windows(&self, cache: &CacheShape, format: KvFormat) -> u64 {
        let one = self.kv_numbers(self.kv_heads()) * format.bytes() * cache.block_size as u64;
        let pages = |window: &NonZeroUsize| cache.pages_of_window(window.get()) as u64;
        self.windows.iter().flatten().map(|window| pages(window) * one).sum()
    }
}
