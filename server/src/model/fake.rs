//! A target for tests: its logits are a hash of the tokens in the slot, so any slip of cache rows, positions or slots changes the output.

use std::ops::Range;

use super::{Batch, BatchRow, ModelError, Taps, Target, TargetShape};

/// Stands in cache rows that only served as padding; reading one changes the hash.
const PADDING: u32 = u32::MAX;

/// Size of the vocabulary.
pub(crate) const VOCAB_SIZE: usize = 64;

/// Columns of the taps: the token and its position.
const TAP_SIZE: usize = 2;

type Hook = Box<dyn FnMut(&Batch) -> Result<(), ModelError> + Send>;

pub(crate) struct FakeTarget {
    shape: TargetShape,
    slots: Vec<Vec<u32>>,
    logits: Vec<Vec<Vec<f32>>>,
    /// `[rows, width, 2]` of the last pass, when it asked for them.
    taps: Option<(Vec<f32>, usize, usize)>,
    /// Added to one logit of every row, to play kernels that depend on shape or content.
    disturbance: fn(&Batch) -> f32,
    poison: Vec<u32>,
    /// Called before each pass; may fail or panic.
    before: Hook,
}

impl FakeTarget {
    pub(crate) fn new(slots: usize, context_tokens: usize) -> Self {
        let shape = TargetShape {
            slots,
            parking_slots: 0,
            context_tokens,
            headroom_tokens: 32,
            vocab_size: VOCAB_SIZE,
            tap_size: TAP_SIZE,
        };
        Self {
            shape,
            slots: vec![Vec::new(); slots],
            logits: Vec::new(),
            taps: None,
            disturbance: |_| 0.0,
            poison: Vec::new(),
            before: Box::new(|_| Ok(())),
        }
    }

    pub(crate) fn parking(mut self, parking_slots: usize) -> Self {
        self.shape.parking_slots = parking_slots;
        self.slots
            .resize(self.shape.slots + parking_slots, Vec::new());
        self
    }

    pub(crate) fn disturbed(disturbance: fn(&Batch) -> f32) -> Self {
        Self {
            disturbance,
            ..Self::new(4, 128)
        }
    }

    pub(crate) fn disturb(&mut self, disturbance: fn(&Batch) -> f32) {
        self.disturbance = disturbance;
    }

    pub(crate) fn before(
        mut self,
        before: impl FnMut(&Batch) -> Result<(), ModelError> + Send + 'static,
    ) -> Self {
        self.before = Box::new(before);
        self
    }

    /// One logit after a sequence of these tokens is not a number.
    pub(crate) fn poisoned_by(mut self, tokens: &[u32]) -> Self {
        self.poison = tokens.to_vec();
        self
    }

    /// The logits after these tokens.
    pub(crate) fn logits_after(tokens: &[u32]) -> Vec<f32> {
        let mut state = tokens
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, &token| {
                (hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01b3)
            });
        let column = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 2_097_152.0
        };
        (0..VOCAB_SIZE).map(column).collect()
    }
}

impl Target for FakeTarget {
    fn shape(&self) -> &TargetShape {
        &self.shape
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        assert!(batch.first_slot + batch.rows.len() <= self.shape.slots);
        (self.before)(batch)?;
        let disturbance = (self.disturbance)(batch);
        let poison = self.poison.clone();
        self.logits.clear();
        let mut taps = Vec::new();
        for (
            index,
            BatchRow {
                start,
                tokens,
                logits,
            },
        ) in batch.rows.iter().enumerate()
        {
            let cache = &mut self.slots[batch.first_slot + index];
            assert!(
                *start <= cache.len(),
                "rows {}..{start} of slot {} were never written",
                cache.len(),
                batch.first_slot + index
            );
            assert!(
                !cache[..*start].contains(&PADDING),
                "a padding row is used as if it were valid"
            );
            assert!(
                tokens.len() <= batch.width
                    && start + batch.width
                        <= self.shape.context_tokens + self.shape.headroom_tokens
            );
            // Rows behind the pass keep what they hold, as they do in a real cache.
            let end = cache.len().max(start + batch.width);
            cache.resize(end, PADDING);
            cache[*start..start + batch.width].fill(PADDING);
            cache[*start..start + tokens.len()].copy_from_slice(tokens);
            let rows = logits.clone().map(|row| {
                let mut logits = Self::logits_after(&cache[..start + row + 1]);
                logits[0] += disturbance;
                if cache[..start + row + 1] == poison {
                    logits[1] = f32::NAN;
                }
                logits
            });
            self.logits.push(rows.collect());
            let range = *start..start + batch.width;
            for (position, &token) in range.clone().zip(&cache[range]) {
                taps.extend([
                    if token == PADDING {
                        f32::NAN
                    } else {
                        token as f32
                    },
                    position as f32,
                ]);
            }
        }
        self.taps = batch.taps.then_some((taps, batch.rows.len(), batch.width));
        Ok(())
    }

    fn copy_rows(&mut self, from: usize, to: usize, rows: Range<usize>) {
        let copied = self.slots[from][rows.clone()].to_vec();
        assert!(!copied.contains(&PADDING), "a padding row is copied");
        let slot = &mut self.slots[to];
        slot.resize(slot.len().max(rows.end), PADDING);
        slot[rows].copy_from_slice(&copied);
    }

    fn logits(&self, row: usize, index: usize) -> &[f32] {
        &self.logits[row][index]
    }

    fn taps(&self) -> Taps<'_> {
        let (values, rows, width) = self.taps.as_ref().expect("the pass asked for taps");
        Taps {
            values,
            rows: *rows,
            width: *width,
            size: TAP_SIZE,
        }
    }
}
