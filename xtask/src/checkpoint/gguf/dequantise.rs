//! Block formats of ggml tensors, and their expansion to fp32.
//!
//! The arithmetic follows the reference in operation order, so results are equal bit for bit (`tests/goldens/gguf`).
//!
//! Formats: `ggml-common.h` and `ggml-quants.c` of <https://github.com/ggml-org/ggml>.

use anyhow::bail;
use half::{bf16, f16};

/// A tensor type that can be expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    non_camel_case_types,
    reason = "the names by which everyone knows these formats"
)]
pub enum TensorType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
}

/// Elements in a block of the K formats.
const SUPER_BLOCK: usize = 256;

impl TensorType {
    /// All of them, for tests and messages.
    pub const ALL: [TensorType; 13] = [
        TensorType::F32,
        TensorType::F16,
        TensorType::BF16,
        TensorType::Q4_0,
        TensorType::Q4_1,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q8_0,
        TensorType::Q2_K,
        TensorType::Q3_K,
        TensorType::Q4_K,
        TensorType::Q5_K,
        TensorType::Q6_K,
    ];

    /// The type of an id in a tensor directory.
    pub fn from_id(id: u32) -> anyhow::Result<TensorType> {
        Ok(match id {
            0 => TensorType::F32,
            1 => TensorType::F16,
            2 => TensorType::Q4_0,
            3 => TensorType::Q4_1,
            6 => TensorType::Q5_0,
            7 => TensorType::Q5_1,
            8 => TensorType::Q8_0,
            10 => TensorType::Q2_K,
            11 => TensorType::Q3_K,
            12 => TensorType::Q4_K,
            13 => TensorType::Q5_K,
            14 => TensorType::Q6_K,
            30 => TensorType::BF16,
            other => {
                let name = match other {
                    9 => "Q8_1",
                    15 => "Q8_K",
                    16 => "IQ2_XXS",
                    17 => "IQ2_XS",
                    18 => "IQ3_XXS",
                    19 => "IQ1_S",
                    20 => "IQ4_NL",
                    21 => "IQ3_S",
                    22 => "IQ2_S",
                    23 => "IQ4_XS",
                    24 => "I8",
                    25 => "I16",
                    26 => "I32",
                    27 => "I64",
                    28 => "F64",
                    29 => "IQ1_M",
                    34 => "TQ1_0",
                    35 => "TQ2_0",
                    39 => "MXFP4",
                    _ => "unknown",
                };
                bail!(
                    "tensor type {other} ({name}) is not supported, only {:?}",
                    TensorType::ALL
                )
            }
        })
    }

    /// Elements in one block; rows are whole blocks.
    pub fn block_elements(self) -> usize {
        match self {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => 1,
            TensorType::Q4_0
            | TensorType::Q4_1
            | TensorType::Q5_0
            | TensorType::Q5_1
            | TensorType::Q8_0 => 32,
            TensorType::Q2_K
            | TensorType::Q3_K
            | TensorType::Q4_K
            | TensorType::Q5_K
            | TensorType::Q6_K => SUPER_BLOCK,
        }
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        match self {
            TensorType::F32 => 4,
            TensorType::F16 | TensorType::BF16 => 2,
            TensorType::Q4_0 => 18,
            TensorType::Q4_1 => 20,
            TensorType::Q5_0 => 22,
            TensorType::Q5_1 => 24,
            TensorType::Q8_0 => 34,
            TensorType::Q2_K => 84,
            TensorType::Q3_K => 110,
            TensorType::Q4_K => 144,
            TensorType::Q5_K => 176,
            TensorType::Q6_K => 210,
        }
    }
}

/// Expands whole blocks. `bytes` and `values` must be of matching length.
pub fn dequantise(kind: TensorType, bytes: &[u8], values: &mut [f32]) {
    assert_eq!(
        bytes.len() / kind.block_bytes(),
        values.len() / kind.block_elements(),
        "blocks and values of {kind:?}"
    );
    let expand: fn(&[u8], &mut [f32]) = match kind {
        TensorType::F32 => {
            |block, out| out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]])
        }
        TensorType::F16 => |block, out| out[0] = half_at(block, 0),
        TensorType::BF16 => {
            |block, out| out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32()
        }
        TensorType::Q4_0 => q4_0,
        TensorType::Q4_1 => q4_1,
        TensorType::Q5_0 => q5_0,
        TensorType::Q5_1 => q5_1,
        TensorType::Q8_0 => q8_0,
        TensorType::Q2_K => q2_k,
        TensorType::Q3_K => q3_k,
        TensorType::Q4_K => q4_k,
        TensorType::Q5_K => q5_k,
        TensorType::Q6_K => q6_k,
    };
    for (block, out) in bytes
        .chunks_exact(kind.block_bytes())
        .zip(values.chunks_exact_mut(kind.block_elements()))
    {
        expand(block, out);
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (j, &byte) in block[2..18].iter().enumerate() {
        out[j] = scale * (i32::from(byte & 15) - 8) as f32;
        out[j + 16] = scale * (i32::from(byte >> 4) - 8) as f32;
    }
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scale, offset) = (half_at(block, 0), half_at(block, 2));
    for (j, &byte) in block[4..20].iter().enumerate() {
        out[j] = scale * f32::from(byte & 15) + offset;
        out[j + 16] = scale * f32::from(byte >> 4) + offset;
    }
}

/// The 32 five-bit values of a Q5 block: the fifth bits first (four bytes), then the nibbles.
fn five_bits(block: &[u8]) -> [u8; 32] {
    let high = u32::from_le_bytes([block[0], block[1], block[2], block[3]]);
    let mut values = [0; 32];
    for (j, &byte) in block[4..20].iter().enumerate() {
        values[j] = (byte & 15) | ((high >> j & 1) << 4) as u8;
        values[j + 16] = (byte >> 4) | ((high >> (j + 16) & 1) << 4) as u8;
    }
    values
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (out, value) in out.iter_mut().zip(five_bits(&block[2..])) {
        *out = scale * (i32::from(value) - 16) as f32;
    }
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (scale, offset) = (half_at(block, 0), half_at(block, 2));
    for (out, value) in out.iter_mut().zip(five_bits(&block[4..])) {
        *out = scale * f32::from(value) + offset;
    }
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half_at(block, 0);
    for (out, &byte) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(byte as i8);
    }
}

/// 16 groups of 16 two-bit values, each group with a four-bit scale and a four-bit offset.
fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let (scale, offset) = (half_at(block, 80), half_at(block, 82));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let group_scale = scale * f32::from(scales[group] & 15);
        let group_offset = offset * f32::from(scales[group] >> 4);
        for (quant, out) in two_bits(quants, group).zip(out) {
            *out = group_scale * f32::from(quant) - group_offset;
        }
    }
}

/// The 16 two-bit values of a group of a K block: 128 elements share 32 bytes, and the groups of a half follow each other through the bit pairs.
fn two_bits(quants: &[u8], group: usize) -> impl Iterator<Item = u8> {
    let start = group / 8 * 32 + group % 2 * 16;
    let shift = group % 8 / 2 * 2;
    quants[start..start + 16]
        .iter()
        .map(move |byte| byte >> shift & 3)
}

/// 16 groups of 16 three-bit values (two bits and a separate high bit), each group with a signed six-bit scale.
fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale = half_at(block, 108);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let low_bits = if group < 8 {
            scales[group] & 15
        } else {
            scales[group - 8] >> 4
        };
        let high_bits = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let group_scale = scale * (i32::from(low_bits | high_bits << 4) - 32) as f32;
        let high = &high[group % 2 * 16..][..16];
        for ((quant, high), out) in two_bits(quants, group).zip(high).zip(out) {
            let high_bit = high >> (group / 2) & 1;
            *out = group_scale * (i32::from(quant | high_bit << 2) - 4) as f32;
        }
    }
}

/// Six-bit scale and offset of one of the eight groups of a Q4_K or Q5_K block.
fn scale_and_offset(scales: &[u8], group: usize) -> (f32, f32) {
    let (scale, offset) = if group < 4 {
        (scales[group] & 63, scales[group + 4] & 63)
    } else {
        (
            scales[group + 4] & 15 | scales[group - 4] >> 6 << 4,
            scales[group + 4] >> 4 | scales[group] >> 6 << 4,
        )
    };
    (scale.into(), offset.into())
}

/// Eight groups of 32 four-bit values; two groups share 32 bytes.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (scale, offset) = (half_at(block, 0), half_at(block, 2));
    let (scales, quants) = (&block[4..16], &block[16..144]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (group_scale, group_offset) = scale_and_offset(scales, group);
        let (group_scale, group_offset) = (scale * group_scale, offset * group_offset);
        for (byte, out) in quants[group / 2 * 32..][..32].iter().zip(out) {
            let quant = byte >> (group % 2 * 4) & 15;
            *out = group_scale * f32::from(quant) - group_offset;
        }
    }
}

/// As Q4_K, with a fifth bit of each value in 32 bytes of their own: bit `group` of each.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (scale, offset) = (half_at(block, 0), half_at(block, 2));
    let (scales, high, quants) = (&block[4..16], &block[16..48], &block[48..176]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (group_scale, group_offset) = scale_and_offset(scales, group);
        let (group_scale, group_offset) = (scale * group_scale, offset * group_offset);
        for ((byte, high), out) in quants[group / 2 * 32..][..32].iter().zip(high).zip(out) {
            let quant = byte >> (group % 2 * 4) & 15 | (high >> group & 1) << 4;
            *out = group_scale * f32::from(quant) - group_offset;
        }
    }
}

/// 16 groups of 16 six-bit values (four bits, and two more bits in bytes of their own), each group with a signed eight-bit scale.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half_at(block, 208);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let group_scale = scale * f32::from(scales[group] as i8);
        // 128 elements share 64 low bytes and 32 high bytes: four runs of 32 elements, two groups a run.
        let (half, run, part) = (group / 8, group % 8 / 2, group % 2);
        let low = &low[half * 64 + run % 2 * 32 + part * 16..][..16];
        let high = &high[half * 32 + part * 16..][..16];
        for ((low, high), out) in low.iter().zip(high).zip(out) {
            let quant = low >> (run / 2 * 4) & 15 | (high >> (run * 2) & 3) << 4;
            *out = group_scale * (i32::from(quant) - 32) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::testing::golden;
    use safetensors::SafeTensors;

    #[test]
    fn every_format_expands_bit_for_bit_as_the_reference_does() {
        let bytes = std::fs::read(golden("gguf/dequantise.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        for kind in TensorType::ALL {
            let blocks = tensors.tensor(&format!("{kind:?}.blocks")).unwrap();
            let expected = tensors.tensor(&format!("{kind:?}.values")).unwrap();
            let expected: Vec<f32> = expected
                .data()
                .chunks_exact(4)
                .map(|value| f32::from_le_bytes(value.try_into().unwrap()))
                .collect();
            let mut values = vec![f32::NAN; expected.len()];
            dequantise(kind, blocks.data(), &mut values);
            let differing = values
                .iter()
                .zip(&expected)
                .position(|(value, expected)| value.to_bits() != expected.to_bits());
            assert_eq!(differing, None, "{kind:?}");
        }
    }

    #[test]
    fn an_unsupported_type_is_named() {
        assert!(
            TensorType::from_id(16)
                .unwrap_err()
                .to_string()
                .contains("16 (IQ2_XXS)")
        );
        assert!(
            TensorType::from_id(4)
                .unwrap_err()
                .to_string()
                .contains("4 (unknown)")
        );
    }
}
