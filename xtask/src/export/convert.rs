//! Numbers on their way from fp32 to what a graph stores: element types, transposition, quantisation.
//!
//! Everything works on one tensor in memory, in parallel, and gives the same bytes whatever the number of threads.

use anyhow::{Result, bail};
use half::{bf16, f16};
use rayon::prelude::*;

#[cfg(target_endian = "big")]
compile_error!("ONNX tensors are little-endian and are written as they are in memory");

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
                    *quantised = (value / scale).round_ties_even().clamp(-127.0, 127.0) as i8;
                }
            }
            scale
        })
        .collect();
    ChannelQuantised { values, scales }
}

/// Quantises each row in blocks to 8 bits around 128.
pub fn quantise_blocks_8(source: &[f32], columns: usize, block: usize) -> BlockQuantised {
    let blocks = columns.div_ceil(block);
    let rows = source.len() / columns;
    let mut values = vec![128u8; rows * blocks * block];
    let mut scales = vec![0f32; rows * blocks];
    source
        .par_chunks(columns)
        .zip(values.par_chunks_mut(blocks * block))
        .zip(scales.par_chunks_mut(blocks))
        .for_each(|((row, values), scales)| {
            for (index, block_values) in row.chunks(block).enumerate() {
                let largest = block_values
                    .iter()
                    .fold(0f32, |largest, value| largest.max(value.abs()));
                let scale = largest / 127.0;
                scales[index] = scale;
                if scale > 0.0 {
                    for (value, quantised) in block_values.iter().zip(&mut values[index * block..])
                    {
                        let level = (value / scale).round_ties_even().clamp(-127.0, 127.0);
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

/// Quantises each row in blocks to 4 bits, each block with its own zero point.
pub fn quantise_blocks_4(source: &[f32], columns: usize, block: usize) -> BlockQuantised {
    let blocks = columns.div_ceil(block);
    let rows = source.len() / columns;
    let row_bytes = blocks * block / 2;
    let mut values = vec![0u8; rows * row_bytes];
    let mut scales = vec![0f32; rows * blocks];
    let mut zero_points = vec![0u8; rows * blocks.div_ceil(2)];
    source
        .par_chunks(columns)
        .zip(values.par_chunks_mut(row_bytes))
        .zip(scales.par_chunks_mut(blocks))
        .zip(zero_points.par_chunks_mut(blocks.div_ceil(2)))
        .for_each(|(((row, values), scales), zero_points)| {
            for (index, block_values) in row.chunks(block).enumerate() {
                // Zero is in the range, since the zero point is one of the 16 levels.
                let (low, high) = block_values
                    .iter()
                    .fold((0f32, 0f32), |(low, high), &value| {
                        (low.min(value), high.max(value))
                    });
                let scale = (high - low) / 15.0;
                let zero_point = if scale > 0.0 {
                    (-low / scale).round_ties_even().clamp(0.0, 15.0)
                } else {
                    8.0
                };
                scales[index] = scale;
                zero_points[index / 2] |= (zero_point as u8) << (4 * (index % 2));
                for position in 0..block {
                    let value = block_values.get(position).copied().unwrap_or(0.0);
                    let level = if scale > 0.0 {
                        (value / scale + zero_point)
                            .round_ties_even()
                            .clamp(0.0, 15.0)
                    } else {
                        zero_point
                    };
                    let element = index * block + position;
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
