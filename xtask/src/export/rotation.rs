//! Rotations that spread outliers before activations are quantised (QuaRot, arXiv 2404.00456).
//!
//! A few channels of a transformer's activations are far larger than all others, and with one scale per row they take the precision of the rest. An
//! orthogonal matrix spreads each of them over a block of channels; the weights on both sides take its inverse in, so that the model computes the same.
//! The matrix is a Hadamard matrix with random signs, made of additions alone.

use rayon::prelude::*;

/// An orthogonal map `R` of channels: block-diagonal, the same matrix in every block. Row vectors are multiplied from the left, `x R`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rotation {
    block: usize,
}

impl Rotation {
    /// The map for `size` channels in blocks of at most `largest` (a power of two).
    pub fn new(size: usize, largest: usize) -> Self {
        let power_of_two = 1 << size.trailing_zeros();
        Self {
            block: largest.min(power_of_two),
        }
    }

    /// Channels per block.
    pub fn block(self) -> usize {
        self.block
    }

    /// Turns every row `x` of a matrix into `x R`.
    pub fn rotate_rows(self, values: &mut [f32]) {
        values
            .par_chunks_mut(self.block)
            .for_each(|block| self.rotate(block, 1));
    }

    /// Turns every column `x` of a matrix `[rows, columns]` into `x R`.
    pub fn rotate_columns(self, values: &mut [f32], columns: usize) {
        values
            .par_chunks_mut(self.block * columns)
            .for_each(|block| self.rotate(block, columns));
    }

    /// The matrix of one block, row-major.
    pub fn matrix(self) -> Vec<f32> {
        let mut matrix = vec![0.0; self.block * self.block];
        for channel in 0..self.block {
            matrix[channel * self.block + channel] = 1.0;
        }
        self.rotate_rows(&mut matrix);
        matrix
    }

    /// `x R` for a block of vectors of `width` values each.
    fn rotate(self, block: &mut [f32], width: usize) {
        for (channel, vector) in block.chunks_exact_mut(width).enumerate() {
            if flips(channel) {
                vector.iter_mut().for_each(|value| *value = -*value);
            }
        }
        let mut half = width;
        while half < block.len() {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let scale = (1.0 / (self.block as f64).sqrt()) as f32;
        block.iter_mut().for_each(|value| *value *= scale);
    }
}

/// Whether a channel of a block changes its sign: without that, a block of equal values would become an outlier. The pattern is arbitrary and fixed.
fn flips(channel: usize) -> bool {
    // SplitMix64 of the channel.
    let mut state = (channel as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (state ^ (state >> 31)) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(a: &[f32], b: &[f32], inner: usize) -> Vec<f32> {
        let columns = b.len() / inner;
        a.chunks(inner)
            .flat_map(|row| {
                (0..columns).map(move |column| {
                    let terms = row.iter().enumerate();
                    terms.map(|(i, a)| a * b[i * columns + column]).sum()
                })
            })
            .collect()
    }

    fn near(a: &[f32], b: &[f32]) -> bool {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5)
    }

    #[test]
    fn blocks_divide_the_channels() {
        for (size, largest, block) in [(576, 256, 64), (4096, 256, 256), (48, 64, 16), (7, 64, 1)] {
            assert_eq!(Rotation::new(size, largest).block(), block);
        }
    }

    #[test]
    fn the_matrix_is_orthogonal() {
        let rotation = Rotation::new(32, 64);
        let matrix = rotation.matrix();
        let transposed = super::super::convert::transpose(&matrix, 32);
        let unit = product(&matrix, &transposed, 32);
        for (index, value) in unit.iter().enumerate() {
            let expect = if index % 33 == 0 { 1.0 } else { 0.0 };
            assert!((value - expect).abs() < 1e-6);
        }
    }

    #[test]
    fn rotating_equals_multiplying_with_the_matrix() {
        let rotation = Rotation::new(24, 64);
        let values: Vec<f32> = (0..48).map(|i| ((i * 37) % 19) as f32 - 9.0).collect();
        let matrix = rotation.matrix();
        assert_eq!(matrix.len(), 64);
        let expect: Vec<f32> = values
            .chunks(8)
            .flat_map(|block| product(block, &matrix, 8))
            .collect();

        let mut rows = values.clone();
        rotation.rotate_rows(&mut rows);
        assert!(near(&rows, &expect));

        let mut columns = super::super::convert::transpose(&values, 24);
        rotation.rotate_columns(&mut columns, 2);
        assert!(near(
            &super::super::convert::transpose(&columns, 2),
            &expect
        ));
    }

    #[test]
    fn an_outlier_and_a_constant_are_spread() {
        let rotation = Rotation::new(64, 64);
        let mut outlier = vec![0.0; 64];
        outlier[17] = 8.0;
        let constant = vec![1.0; 64];
        for mut values in [outlier, constant] {
            rotation.rotate_rows(&mut values);
            let largest = values.iter().fold(0f32, |largest, v| largest.max(v.abs()));
            assert!(largest < 4.0, "{values:?}");
        }
    }
}
