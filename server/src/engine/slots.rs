//! What the slots of KV memory hold, with a sequence or from one that has ended, and what of a prompt is there already.
//!
//! The rows of a token are a pure function of the tokens up to it, in the target's cache and in the draft's, so whose they are shows only in time.
//! That is why a beginning that another caller sent counts in whole blocks of [`SHARED_BLOCK_TOKENS`]:
//! token by token, the time of an answer, or the count of cached tokens in it, would tell one caller what another one wrote.
//!
//! This file plans; rows are copied in [`super::step`].

use std::sync::Arc;

use super::sequence::Sequence;

/// Tokens by which a beginning counts that another caller sent: too many to be guessed at once.
pub(super) const SHARED_BLOCK_TOKENS: usize = 64;

/// Fewest tokens that are worth the place of others.
const LEAST_PARKED_TOKENS: usize = 32;

/// A slot of KV memory.
pub(super) enum Slot {
    /// No sequence runs in it.
    Idle(Kept),
    /// A sequence runs in it; the one with the lowest turn is the next to feed a chunk of its prompt.
    Running { turn: u64, sequence: Box<Sequence> },
}

/// Rows that a sequence left behind.
#[derive(Default)]
pub(super) struct Kept {
    caller: Arc<str>,
    /// Tokens whose rows are in the target's cache.
    tokens: Vec<u32>,
    /// Rows in the draft's cache, at most as many.
    draft_rows: usize,
    /// When they were last of use; those of the lowest go first.
    used: u64,
}

/// Rows that are valid in a slot.
#[derive(Clone, Copy)]
struct Rows<'a> {
    caller: &'a str,
    tokens: &'a [u32],
    draft_rows: usize,
}

/// The slot that holds most of the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Source {
    pub slot: usize,
    /// Tokens of the beginning; never the whole prompt.
    pub tokens: usize,
    /// Rows of them that are in the draft's cache.
    pub draft_rows: usize,
}

impl Kept {
    /// Rows in the draft's cache.
    pub(super) fn draft_rows(&self) -> usize {
        self.draft_rows
    }
}

/// How many rows are valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvRows {
    /// Rows that there are.
    pub capacity: usize,
    /// Valid rows of running sequences.
    pub running: usize,
    /// Valid rows that sequences left behind.
    pub kept: usize,
}

impl Slot {
    fn rows(&self) -> Rows<'_> {
        match self {
            Self::Idle(kept) => Rows {
                caller: &kept.caller,
                tokens: &kept.tokens,
                draft_rows: kept.draft_rows,
            },
            Self::Running { sequence, .. } => Rows {
                caller: &sequence.request().caller,
                tokens: sequence.committed(0, sequence.cached()),
                draft_rows: sequence.draft.context,
            },
        }
    }
}

/// All slots: first those that sequences run in, then those that only keep rows.
pub(super) struct Slots {
    slots: Vec<Slot>,
    running_slots: usize,
    /// Rows of one slot.
    slot_rows: usize,
    /// The turn behind all others.
    last_turn: u64,
    /// How often rows were of use.
    uses: u64,
}

impl Slots {
    pub(super) fn new(running_slots: usize, parking_slots: usize, slot_rows: usize) -> Self {
        let slots = (0..running_slots + parking_slots).map(|_| Slot::Idle(Kept::default()));
        Self {
            slots: slots.collect(),
            running_slots,
            slot_rows,
            last_turn: 0,
            uses: 0,
        }
    }

    /// The lowest slot that no sequence runs in: active slots stay close together, since the gaps between them are computed as well.
    pub(super) fn free(&self) -> Option<usize> {
        let mut running = self.slots[..self.running_slots].iter();
        running.position(|slot| matches!(slot, Slot::Idle(_)))
    }

    /// Running sequences by slot.
    pub(super) fn running(&self) -> impl Iterator<Item = (usize, &Sequence)> {
        let slots = self.slots.iter().enumerate();
        slots.filter_map(|(index, slot)| match slot {
            Slot::Running { sequence, .. } => Some((index, &**sequence)),
            Slot::Idle(_) => None,
        })
    }

    pub(super) fn sequence(&self, slot: usize) -> Option<&Sequence> {
        match &self.slots[slot] {
            Slot::Running { sequence, .. } => Some(sequence),
            Slot::Idle(_) => None,
        }
    }

    pub(super) fn sequence_mut(&mut self, slot: usize) -> Option<&mut Sequence> {
        match &mut self.slots[slot] {
            Slot::Running { sequence, .. } => Some(sequence),
            Slot::Idle(_) => None,
        }
    }

    /// The slots from `first` on.
    pub(super) fn behind_mut(&mut self, first: usize) -> impl Iterator<Item = &mut Slot> {
        self.slots[first..].iter_mut()
    }

    /// Puts a sequence that has just got its slot, or its turn to feed a chunk, behind all others.
    pub(super) fn put(&mut self, slot: usize, sequence: Box<Sequence>) {
        let turn = self.next_turn();
        self.slots[slot] = Slot::Running { turn, sequence };
    }

    fn next_turn(&mut self) -> u64 {
        self.last_turn += 1;
        self.last_turn
    }

    /// The slot whose turn it is to feed a chunk of its prompt; the turn passes on.
    pub(super) fn take_turn(&mut self) -> Option<usize> {
        let next = self.next_turn();
        let slots = self.slots.iter_mut().enumerate();
        let prefilling = slots.filter_map(|(index, slot)| match slot {
            Slot::Running { turn, sequence } if sequence.is_prefilling() => Some((index, turn)),
            _ => None,
        });
        let (index, turn) = prefilling.min_by_key(|(_, turn)| **turn)?;
        *turn = next;
        Some(index)
    }

    /// Ends the sequence in `slot`; what it has computed stays there when `keep` says that it is sound.
    pub(super) fn end(&mut self, slot: usize, keep: bool) {
        self.uses += 1;
        let rows = self.slots[slot].rows();
        let kept = if keep {
            Kept {
                caller: rows.caller.into(),
                tokens: rows.tokens.to_vec(),
                draft_rows: rows.draft_rows.min(rows.tokens.len()),
                used: self.uses,
            }
        } else {
            Kept::default()
        };
        self.slots[slot] = Slot::Idle(kept);
    }

    /// Valid rows of the target's cache in a slot without a sequence.
    pub(super) fn kept_rows(&self, slot: usize) -> usize {
        match &self.slots[slot] {
            Slot::Idle(kept) => kept.tokens.len(),
            Slot::Running { .. } => 0,
        }
    }

    /// Valid rows in all slots.
    pub(super) fn kv_rows(&self) -> KvRows {
        let mut rows = KvRows {
            capacity: self.slots.len() * self.slot_rows,
            ..KvRows::default()
        };
        for slot in &self.slots {
            let valid = slot.rows().tokens.len();
            match slot {
                Slot::Idle(_) => rows.kept += valid,
                Slot::Running { .. } => rows.running += valid,
            }
        }
        rows
    }

    /// The slot that holds most of what `prompt` of `caller` begins with; the last token of a prompt is always left to be fed.
    pub(super) fn source(&self, caller: &str, prompt: &[u32]) -> Option<Source> {
        let (_, beginning) = prompt.split_last()?;
        let sources = self.slots.iter().enumerate().map(|(slot, entry)| {
            let rows = entry.rows();
            let mut tokens = common(rows.tokens, beginning);
            if rows.caller != caller {
                tokens -= tokens % SHARED_BLOCK_TOKENS;
            }
            Source {
                slot,
                tokens,
                draft_rows: rows.draft_rows.min(tokens),
            }
        });
        sources
            .filter(|source| source.tokens > 0)
            .max_by_key(|source| (source.tokens, source.draft_rows))
    }

    /// Notes that a sequence has taken over the first `tokens` rows of `slot`.
    pub(super) fn note_use(&mut self, slot: usize, tokens: usize) {
        self.uses += 1;
        if let Slot::Idle(kept) = &mut self.slots[slot] {
            // What was taken over whole is held twice from now on, and the first to go.
            let is_whole = tokens == kept.tokens.len();
            kept.used = if is_whole { 0 } else { self.uses };
        }
    }

    /// Where the rows in `slot`, which is about to be taken by a sequence with this prompt, are to be kept instead; never in `source`.
    ///
    /// `None` when there are too few, when another slot holds them as well, or when all others have been of use later.
    pub(super) fn place_to_park(
        &self,
        slot: usize,
        prompt: &[u32],
        source: Option<Source>,
    ) -> Option<usize> {
        let Slot::Idle(kept) = &self.slots[slot] else {
            return None;
        };
        let rows = self.slots[slot].rows();
        let is_held = |other: Rows<'_>| {
            other.draft_rows >= rows.draft_rows && other.tokens.starts_with(rows.tokens)
        };
        let others = || {
            self.slots
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != slot)
        };
        if rows.tokens.len() < LEAST_PARKED_TOKENS
            || prompt.starts_with(rows.tokens)
            || others().any(|(_, other)| is_held(other.rows()))
        {
            return None;
        }
        let idle = others().filter_map(|(index, other)| match other {
            Slot::Idle(other) if source.is_none_or(|source| source.slot != index) => {
                Some((other.used, index))
            }
            _ => None,
        });
        // Of equally old ones the last, which is taken by a sequence last.
        let (used, place) = idle.min_by_key(|(used, index)| (*used, usize::MAX - index))?;
        (used <= kept.used).then_some(place)
    }

    /// Notes that the rows in `slot` were copied to `place`; returns how many of the target's and of the draft's there are.
    pub(super) fn park(&mut self, slot: usize, place: usize) -> (usize, usize) {
        let entry = std::mem::replace(&mut self.slots[slot], Slot::Idle(Kept::default()));
        let rows = entry.rows();
        let counts = (rows.tokens.len(), rows.draft_rows);
        self.slots[place] = entry;
        counts
    }
}

/// Length of the common beginning.
fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}
