//! Counter-based noise, and the race that turns it into a choice.
//!
//! Target and draft head choose by the same rule with the same noise: where their scores agree, so do their tokens.
//! The noise of a token at a position is a pure function of the request's seed, the position and the token id, whoever asks and in whatever order.
//!
//! The Gumbel-max rule, the largest `score / temperature + gumbel`, is evaluated as an exponential race, which picks the same token:
//! with `e = -ln(u)`, the smallest `e / exp(score / temperature)`.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Domain separation of the noise key, so that a seed means nothing to any other use of the generator.
pub const NOISE_DOMAIN: &[u8; 16] = b"outrider noise 1";

/// Unnormalised probability of a score; the largest score has 1.
pub fn weight(score: f32, largest: f32, inverse_temperature: f64) -> f64 {
    (f64::from(score - largest) * inverse_temperature).exp()
}

/// Noise of one position: one 32-bit word per token, reachable in any order.
///
/// The words are the output of ChaCha8 under the key `NOISE_DOMAIN ‖ seed ‖ 0` with the position as stream, word by word.
#[derive(Clone, Debug)]
pub struct Noise {
    generator: ChaCha8Rng,
}

impl Noise {
    /// The noise of the token at `position`, counted from the beginning of the prompt, of the request with this seed.
    pub fn new(seed: u64, position: u64) -> Self {
        let mut key = [0; 32];
        key[..16].copy_from_slice(NOISE_DOMAIN);
        key[16..24].copy_from_slice(&seed.to_le_bytes());
        let mut generator = ChaCha8Rng::from_seed(key);
        generator.set_stream(position);
        Self { generator }
    }

    /// The word of token `id`.
    pub fn word(&self, id: u32) -> u32 {
        let mut generator = self.generator.clone();
        generator.set_word_pos(u128::from(id));
        generator.next_u32()
    }

    /// The words of tokens `0..count`, little-endian.
    pub fn fill(&self, words: &mut Vec<u8>, count: usize) {
        words.resize(count * 4, 0);
        self.generator.clone().fill_bytes(words);
    }
}

/// An exponential race: every token finishes at `-ln(u) / weight`, the first wins, the lower id among equals.
#[derive(Debug, Default)]
pub struct Race {
    best: Option<(f64, u32)>,
}

impl Race {
    /// Lets token `id` run, with its [`weight`] and its word of [`Noise`].
    pub fn enter(&mut self, id: u32, weight: f64, word: u32) {
        // The middle of the word's interval: never 0 and never 1.
        let uniform = (f64::from(word) + 0.5) / 4_294_967_296.0;
        if let Some((best, _)) = self.best {
            // `-ln(u) >= 1 - u`: most tokens can't win and need no logarithm.
            if 1.0 - uniform > best * weight {
                return;
            }
        }
        let time = -uniform.ln() / weight;
        match self.best {
            Some((best, best_id)) if time > best || (time == best && id > best_id) => {}
            _ if time.is_finite() => self.best = Some((time, id)),
            _ => {}
        }
    }

    /// The winner; `fallback` when every weight was too small to count.
    pub fn winner(&self, fallback: u32) -> u32 {
        self.best.map_or(fallback, |(_, id)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_the_same_by_lookup_and_in_bulk_and_differs_by_seed_and_position() {
        let noise = Noise::new(42, 7);
        let mut words = Vec::new();
        noise.fill(&mut words, 300);
        for id in [0u32, 1, 15, 16, 17, 63, 64, 299] {
            let word = &words[id as usize * 4..][..4];
            assert_eq!(noise.word(id).to_le_bytes(), word, "token {id}");
        }
        assert_ne!(Noise::new(42, 8).word(0), noise.word(0));
        assert_ne!(Noise::new(43, 7).word(0), noise.word(0));
    }

    #[test]
    fn words_are_those_of_chacha8_by_its_definition() {
        for (seed, position, id) in [
            (0, 0, 0),
            (42, 7, 1),
            (u64::MAX, 1 << 40, 49_151),
            (0x0123_4567_89ab_cdef, 3, 17),
        ] {
            assert_eq!(
                Noise::new(seed, position).word(id),
                chacha8_word(seed, position, id),
                "seed {seed}, position {position}, token {id}"
            );
        }
    }

    /// One word of the keystream, written from the definition of the cipher: 64-bit block counter, 64-bit nonce, eight rounds.
    fn chacha8_word(seed: u64, position: u64, id: u32) -> u32 {
        let mut state = [0_u32; 16];
        let words = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        for (word, bytes) in state
            .iter_mut()
            .zip(b"expand 32-byte k".chunks(4).chain(NOISE_DOMAIN.chunks(4)))
        {
            *word = words(bytes);
        }
        (state[8], state[9]) = (seed as u32, (seed >> 32) as u32);
        state[12] = id / 16;
        (state[14], state[15]) = (position as u32, (position >> 32) as u32);
        let start = state;
        let mut quarter = |[a, b, c, d]: [usize; 4]| {
            for (x, y, z, turn) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
                state[x] = state[x].wrapping_add(state[y]);
                state[z] = (state[z] ^ state[x]).rotate_left(turn);
            }
        };
        for _ in 0..4 {
            for column in 0..4 {
                quarter([0, 4, 8, 12].map(|row| row + column));
            }
            for diagonal in 0..4 {
                quarter([0, 1, 2, 3].map(|row| 4 * row + (diagonal + row) % 4));
            }
        }
        let place = (id % 16) as usize;
        state[place].wrapping_add(start[place])
    }
}
