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
