//! Numbers on their way from fp32 to what a graph stores: element types, transposition, quantisation.
//!
//! Everything works on one tensor in memory, in parallel, and gives the same bytes whatever the number of threads.

use anyhow::{Result, bail};
use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(target_endian = "big")]
compile_error!("ONNX tensors are little-endian and are written as they are in memory");

/// Values per scale of 4-bit and blockwise 8-bit weights. Larger blocks make rows depend on how many are computed together in ONNX Runtime 1.31.
pub const BLOCK: usize = 32;

/// Rows or columns that one task of a transposition handles: a cache line of bytes.
const TILE: usize = 64;

/// Weights with one scale per output channel.
pub struct ChannelQuantised {
    /// Values, as the source was laid out.
    pub values: Vec<i8>,
    /// One scale per row of the source.
    pub scales: Vec<f32>,
}

/// Weights with one scale (and one zero point) per block of a row.
pub struct BlockQuantised {
    /// `[rows, blocks, block * bits / 8]`, low bits first.
    pub values: Vec<u8>,
    /// `[rows, blocks]`.
    pub scales: Vec<f32>,
    /// `[rows, blocks]` packed as the values are, each row from a new byte; empty if all are the middle of the range.
    pub zero_points: Vec<u8>,
}

/// Fails unless every value is a finite number.
pub fn check_finite(values: &[f32]) -> Result<()> {
    match values.par_iter().position_any(|value| !value.is_finite()) {
        Some(index) => bail!("value {index} is {}, not a finite number", values[index]),
        None => Ok(()),
    }
}

/// Rounds to half precision; a value beyond its range is an error.
pub fn to_f16(values: &[f32]) -> Result<Vec<f16>> {
    let halves: Vec<f16> = values
        .par_iter()
        .map(|&value| f16::from_f32(value))
        .collect();
    match halves.par_iter().position_any(|half| half.is_infinite()) {
        Some(index) => bail!(
            "value {index} is {}, which fp16 can't hold (its largest is {})",
            values[index],
            f16::MAX
        ),
        None => Ok(halves),
    }
}

/// Rounds to bfloat16.
pub fn to_bf16(values: &[f32]) -> Vec<bf16> {
    values
        .par_iter()
        .map(|&value| bf16::from_f32(value))
        .collect()
}

/// Turns `[rows, columns]` into `[columns, rows]`.
pub fn transpose<T: Copy + Default + Send + Sync>(source: &[T], columns: usize) -> Vec<T> {
    let rows = source.len() / columns;
    let mut target = vec![T::default(); source.len()];
    target
        .par_chunks_mut(TILE * rows)
        .enumerate()
        .for_each(|(tile, chunk)| {
            let first = tile * TILE;
            let width = chunk.len() / rows;
            for row_tile in (0..rows).step_by(TILE) {
                for row in row_tile..rows.min(row_tile + TILE) {
                    let part = &source[row * columns + first..][..width];
                    for (column, &value) in part.iter().enumerate() {
                        chunk[column * rows + row] = value;
                    }
                }
            }
        });
    target
}

/// Multiplies every row with a vector, value by value.
pub fn scale_columns(values: &mut [f32], factors: &[f32]) {
    values.par_chunks_mut(factors.len()).for_each(|row| {
        row.iter_mut()
            .zip(factors)
            .for_each(|(value, factor)| *value *= factor);
    });
}

/// Quantises each row symmetrically to -127..=127.
pub fn quantise_channels(source: &[f32], columns: usize) -> ChannelQuantised {
    let mut values = vec![0i8; source.len()];
    let scales = source
        .par_chunks(columns)
        .zip(values.par_chunks_mut(columns))
        .map(|(row, values)| {
            let largest = row
                .iter()
                .fold(0f32, |largest, value| largest.max(value.abs()));
            let scale = largest / 127.0;
            if scale > 0.0 {
                for (value, quantised) in row.iter().zip(values) {
                    *quantised = nearest((value / scale).clamp(-127.0, 127.0)) as i8;
                }
            }
            scale
        })
        .collect();
    ChannelQuantised { values, scales }
}

/// Quantises each row in blocks to 8 bits around 128.
pub fn quantise_blocks_8(source: &[f32], columns: usize) -> BlockQuantised {
    let blocks = columns.div_ceil(BLOCK);
    let rows = source.len() / columns;
    let mut values = vec![128u8; rows * blocks * BLOCK];
    let mut scales = vec![0f32; rows * blocks];
    source
        .par_chunks(columns)
        .zip(values.par_chunks_mut(blocks * BLOCK))
        .zip(scales.par_chunks_mut(blocks))
        .for_each(|((row, values), scales)| {
            for (index, block_values) in row.chunks(BLOCK).enumerate() {
                let largest = block_values
                    .iter()
                    .fold(0f32, |largest, value| largest.max(value.abs()));
                let scale = largest / 127.0;
                scales[index] = scale;
                if scale > 0.0 {
                    for (value, quantised) in block_values.iter().zip(&mut values[index * BLOCK..])
                    {
                        let level = nearest((value / scale).clamp(-127.0, 127.0));
                        *quantised = (level + 128.0) as u8;
                    }
                }
            }
        });
    BlockQuantised {
        values,
        scales,
        zero_points: Vec::new(),
    }
}

/// Quantises each row in blocks to 4 bits, each block with the scale and zero point that fit it best.
pub fn quantise_blocks_4(source: &[f32], columns: usize) -> BlockQuantised {
    let blocks = columns.div_ceil(BLOCK);
    let rows = source.len() / columns;
    let row_bytes = blocks * BLOCK / 2;
    let mut values = vec![0u8; rows * row_bytes];
    let mut scales = vec![0f32; rows * blocks];
    let mut zero_points = vec![0u8; rows * blocks.div_ceil(2)];
    source
        .par_chunks(columns)
        .zip(values.par_chunks_mut(row_bytes))
        .zip(scales.par_chunks_mut(blocks))
        .zip(zero_points.par_chunks_mut(blocks.div_ceil(2)))
        .for_each(|(((row, values), scales), zero_points)| {
            for (index, part) in row.chunks(BLOCK).enumerate() {
                let mut block = [0f32; BLOCK];
                block[..part.len()].copy_from_slice(part);
                let fit = Fit::best(&block);
                scales[index] = fit.scale;
                zero_points[index / 2] |= (fit.zero_point as u8) << (4 * (index % 2));
                for (position, value) in block.iter().enumerate() {
                    let level = fit.level(*value) + fit.zero_point;
                    let element = index * BLOCK + position;
                    values[element / 2] |= (level as u8) << (4 * (element % 2));
                }
            }
        });
    BlockQuantised {
        values,
        scales,
        zero_points,
    }
}

/// Scale and zero point of a 4-bit block.
#[derive(Clone, Copy, Debug)]
struct Fit {
    scale: f32,
    zero_point: f32,
}

impl Fit {
    const LEVELS: f32 = 15.0;

    /// Parts of the range that are tried as the range of the levels: what lies outside is clipped.
    const RANGES: [f32; 6] = [0.8, 0.85, 0.9, 0.95, 1.0, 1.05];

    /// The fit with the least square error among those around the range of the values, each refined by least squares.
    fn best(block: &[f32; BLOCK]) -> Self {
        // Zero is in the range, since the zero point is one of the levels.
        let (low, high) = block
            .iter()
            .fold((0f32, 0f32), |(low, high), &v| (low.min(v), high.max(v)));
        let scale = (high - low) / Self::LEVELS;
        if scale < f32::MIN_POSITIVE {
            return Self {
                scale: 1.0,
                zero_point: 8.0,
            };
        }
        let middle = nearest(-low / scale);
        let mut best = (
            f32::INFINITY,
            Self {
                scale,
                zero_point: middle,
            },
        );
        for shift in [-1.0, 0.0, 1.0] {
            let zero_point = (middle + shift).clamp(0.0, Self::LEVELS);
            for range in Self::RANGES {
                let fit = Self {
                    scale: scale * range,
                    zero_point,
                };
                let fit = fit.refined(block);
                let error = fit.error(block);
                if error < best.0 {
                    best = (error, fit);
                }
            }
        }
        best.1
    }

    /// The level of a value, counted from the zero point.
    fn level(self, value: f32) -> f32 {
        nearest((value / self.scale).clamp(-self.zero_point, Self::LEVELS - self.zero_point))
    }

    /// The same levels with the scale that fits them best.
    fn refined(self, block: &[f32; BLOCK]) -> Self {
        let [products, squares] = lane_sums(block, |value| {
            let level = self.level(value);
            [level * value, level * level]
        });
        let scale = products / squares;
        Self {
            scale: if scale >= f32::MIN_POSITIVE {
                scale
            } else {
                self.scale
            },
            ..self
        }
    }

    fn error(self, block: &[f32; BLOCK]) -> f32 {
        let [error] = lane_sums(block, |value| {
            let error = self.level(value) * self.scale - value;
            [error * error]
        });
        error
    }
}

/// Sums in eight lanes, an order that compilers turn into vector code on every machine.
fn lane_sums<const N: usize>(block: &[f32; BLOCK], terms: impl Fn(f32) -> [f32; N]) -> [f32; N] {
    let mut lanes = [[0f32; 8]; N];
    for values in block.chunks_exact(8) {
        for lane in 0..8 {
            let terms = terms(values[lane]);
            for (lanes, term) in lanes.iter_mut().zip(terms) {
                lanes[lane] += term;
            }
        }
    }
    lanes.map(|lanes| lanes.iter().sum())
}

/// The nearest integer, the even one of two, of a value below 2^22 in size; unlike the library function it is vector code on every machine.
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (value + SHIFT) - SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(length: usize) -> Vec<f32> {
        (0..length as u32)
            .map(|index| (index.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 24) as f32 - 0.4)
            .collect()
    }

    /// What a reader of 4-bit or 8-bit blocks makes of them, padding included.
    fn values_of(blocks: &BlockQuantised, rows: usize, bits: usize) -> Vec<f32> {
        let per_row = blocks.scales.len() / rows;
        let nibble = |bytes: &[u8], index: usize| (bytes[index / 2] >> (4 * (index % 2))) & 15;
        let mut values = Vec::new();
        for row in 0..rows {
            for block in 0..per_row {
                let scale = blocks.scales[row * per_row + block];
                let zero_point = match bits {
                    8 => 128,
                    _ => nibble(&blocks.zero_points[row * per_row.div_ceil(2)..], block),
                };
                for position in 0..BLOCK {
                    let element = (row * per_row + block) * BLOCK + position;
                    let level = match bits {
                        8 => blocks.values[element],
                        _ => nibble(&blocks.values, element),
                    };
                    values.push((f32::from(level) - f32::from(zero_point)) * scale);
                }
            }
        }
        values
    }

    #[test]
    fn a_transposed_matrix_has_rows_for_columns() {
        for (rows, columns) in [(1, 5), (3, 2), (70, 130), (129, 64)] {
            let source: Vec<u32> = (0..(rows * columns) as u32).collect();
            let target = transpose(&source, columns);
            for row in 0..rows {
                for column in 0..columns {
                    assert_eq!(
                        target[column * rows + row],
                        source[row * columns + column],
                        "{rows} x {columns}"
                    );
                }
            }
        }
    }

    #[test]
    fn channels_use_the_whole_range_of_their_own_scale() {
        let mut source = noise(3 * 50);
        source[50..100].fill(0.0);
        source[100..].iter_mut().for_each(|value| *value *= 1000.0);
        let quantised = quantise_channels(&source, 50);
        for (row, values) in quantised.values.chunks(50).enumerate() {
            let scale = quantised.scales[row];
            for (level, value) in values.iter().zip(&source[row * 50..]) {
                assert!((f32::from(*level) * scale - value).abs() <= scale * 0.501);
            }
            let largest = values.iter().map(|level| level.unsigned_abs()).max();
            assert_eq!(largest, Some(if row == 1 { 0 } else { 127 }));
        }
    }

    #[test]
    fn blocks_come_back_within_half_a_level_and_zeros_exactly() {
        // 75 columns: two blocks and a third that is padded.
        let (rows, columns, padded) = (4, 75, 96);
        let mut source = noise(rows * columns);
        source[columns..columns + 40].fill(0.0);
        let eight = values_of(&quantise_blocks_8(&source, columns), rows, 8);
        let four = values_of(&quantise_blocks_4(&source, columns), rows, 4);
        for row in 0..rows {
            for column in 0..padded {
                let value = match column {
                    0..75 => source[row * columns + column],
                    _ => 0.0,
                };
                let at = row * padded + column;
                if value == 0.0 {
                    assert_eq!((eight[at], four[at]), (0.0, 0.0));
                }
                // The range is 1, and least squares may clip its ends.
                assert!((eight[at] - value).abs() < 0.6 / 127.0 * 0.6);
                assert!((four[at] - value).abs() < 1.5 / 15.0);
            }
        }
    }

    #[test]
    fn the_fit_of_a_block_is_better_than_its_plain_range() {
        // Bell-shaped, as weights are: a block's range is set by few values.
        let source: Vec<f32> = noise(32 * 200 * 6)
            .chunks(6)
            .map(|parts| parts.iter().sum::<f32>() - 0.6)
            .collect();
        let fitted = values_of(&quantise_blocks_4(&source, 32), 200, 4);
        let error: f64 = fitted
            .iter()
            .zip(&source)
            .map(|(a, b)| f64::from(a - b).powi(2))
            .sum();
        let plain: f64 = source
            .chunks(32)
            .flat_map(|block| {
                let low = block.iter().copied().fold(0.0, f32::min);
                let high = block.iter().copied().fold(0.0, f32::max);
                let scale = (high - low) / 15.0;
                let zero_point = (-low / scale).round();
                block.iter().map(move |value| {
                    let level = (value / scale + zero_point).round().clamp(0.0, 15.0);
                    f64::from((level - zero_point) * scale - value).powi(2)
                })
            })
            .sum();
        assert!(error < 0.9 * plain, "{error} against {plain}");
    }

    #[test]
    fn numbers_that_a_type_cannot_hold_are_named() {
        let message = |result: Result<()>| result.unwrap_err().to_string();
        assert_eq!(
            message(check_finite(&[1.0, f32::NEG_INFINITY])),
            "value 1 is -inf, not a finite number"
        );
        assert_eq!(
            message(to_f16(&[0.0, 0.0, -70_000.0]).map(drop)),
            "value 2 is -70000, which fp16 can't hold (its largest is 65504)"
        );
        assert!(to_f16(&[65504.0, -65504.0]).is_ok());
    }
}
