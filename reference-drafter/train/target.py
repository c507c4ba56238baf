"""The frozen target in PyTorch: weights from its GGUF file, a batched forward pass with a cache, taps, logits.

Owns the target's arithmetic and nothing else: what is asked and what is kept of the answers is `generate`'s matter.
Matrices are bf16 with f32 residuals: serving quantises the target anyway, and a drafter must bear such differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch.nn import functional


@dataclass(frozen=True)
class Geometry:
    """The numbers of the target that the drafter shares."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rms_eps: float
    rope_theta: float


EMBEDDING = "token_embd.weight"


def dequantised(tensor: gguf.ReaderTensor) -> torch.Tensor:
    """A tensor of the file in f32."""
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()


def geometry_and_embedding(reader: gguf.GGUFReader) -> tuple[Geometry, torch.Tensor]:
    """What a drafter takes from its target's file: the shared numbers, and the embedding [vocab, hidden] in f32."""

    def number(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    embedding = dequantised(next(tensor for tensor in reader.tensors if tensor.name == EMBEDDING))
    heads = int(number("attention.head_count"))
    return Geometry(
        hidden_size=embedding.shape[1],
        layers=int(number("block_count")),
        heads=heads,
        kv_heads=int(number("attention.head_count_kv")),
        head_dim=embedding.shape[1] // heads,
        ffn_size=int(number("feed_forward_length")),
        vocab_size=embedding.shape[0],
        rms_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope_theta=float(number("rope.freq_base")),
    ), embedding


def half_split_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Brings q or k rows [heads * head_dim, hidden] from GGUF's interleaved rotary pairs to half-split order."""
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def rotary_tables(head_dim: int, theta: float, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head_dim / 2] in f32 from f64 angles."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding of x [..., head_dim]; cos and sin broadcast over [..., head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Cache:
    """Keys and values of `slots` sequences of up to `rows` tokens, per layer [slots * kv_heads, rows, head_dim].

    Slots and heads share a dimension, and attention reads all rows: PyTorch's batched product copies anything else.
    """

    def __init__(self, geometry: Geometry, slots: int, rows: int, dtype: torch.dtype) -> None:
        self.kv_heads = geometry.kv_heads
        shape = (slots * geometry.kv_heads, rows, geometry.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(geometry.layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(geometry.layers)]

    def take(self, slots: torch.Tensor, other: Cache) -> None:
        """Copies the whole of `other`, a cache of as many slots and fewer rows, into `slots`."""
        rows = other.keys[0].shape[1]
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[self.places(slots), :rows] = theirs

    def of(self, slots: torch.Tensor) -> Cache:
        """The cache of these slots alone."""
        small = object.__new__(Cache)
        small.kv_heads = self.kv_heads
        small.keys = [keys[self.places(slots)] for keys in self.keys]
        small.values = [values[self.places(slots)] for values in self.values]
        return small

    def places(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows of the first dimension that belong to `slots`."""
        return (slots[:, None] * self.kv_heads + torch.arange(self.kv_heads)).flatten()


class Target:
    """The target's layers; `forward` gives the taps and the last hidden state, `logits` applies the head."""

    def __init__(self, path: Path, tap_layers: list[int], dtype: torch.dtype = torch.bfloat16, rows: int = 1024) -> None:
        reader = gguf.GGUFReader(path)
        self.geometry, self.embedding = geometry_and_embedding(reader)
        tensors = {tensor.name: dequantised(tensor) for tensor in reader.tensors if tensor.name != EMBEDDING}
        self.dtype = dtype
        self.tap_layers = tap_layers
        self.head = self.embedding.to(dtype)
        self.norm = tensors["output_norm.weight"]
        self.layers = []
        for index in range(self.geometry.layers):
            part = {name: tensors[f"blk.{index}.{name}.weight"] for name in (
                "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
            )}
            part["attn_q"] = half_split_rows(part["attn_q"], self.geometry.heads)
            part["attn_k"] = half_split_rows(part["attn_k"], self.geometry.kv_heads)
            self.layers.append(part)
        self.fused = [
            (
                torch.cat((part["attn_q"], part["attn_k"], part["attn_v"])).to(dtype),
                part["attn_output"].to(dtype),
                torch.cat((part["ffn_gate"], part["ffn_up"])).to(dtype),
                part["ffn_down"].to(dtype),
            )
            for part in self.layers
        ]
        self.cos, self.sin = rotary_tables(self.geometry.head_dim, self.geometry.rope_theta, rows)

    def cache(self, slots: int, rows: int) -> Cache:
        """An empty cache for `slots` sequences of up to `rows` tokens."""
        return Cache(self.geometry, slots, rows, self.dtype)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, start: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs ids [slots, width] at positions start[slot].. and writes their keys and values into the cache.

        Returns the taps [slots, width, taps * hidden] (bf16: the residual stream after each tapped layer, in order)
        and the normed last hidden state [slots, width, hidden] (f32).
        Rows a caller pads with cost time and are overwritten by the next tokens of the slot.
        """
        shape = self.geometry
        slots, width = ids.shape
        positions = start[:, None] + torch.arange(width)
        rows = cache.keys[0].shape[1]
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        group = shape.heads // shape.kv_heads
        hidden_rows = torch.where(
            torch.arange(rows) <= positions[:, :, None], 0.0, float("-inf")
        )  # [slots, width, rows]
        mask = hidden_rows[:, None, None].expand(slots, shape.kv_heads, group, width, rows)
        mask = mask.reshape(slots * shape.kv_heads, group * width, rows).to(self.dtype)
        place = torch.arange(slots * shape.kv_heads)[:, None]
        row = positions[:, None].expand(slots, shape.kv_heads, width).reshape(slots * shape.kv_heads, width)
        stream = self.embedding[ids]
        taps = []
        for index, (qkv_weight, output_weight, gate_up_weight, down_weight) in enumerate(self.fused):
            part = self.layers[index]
            normed = functional.rms_norm(stream, (shape.hidden_size,), part["attn_norm"], shape.rms_eps)
            qkv = functional.linear(normed.to(self.dtype), qkv_weight).float()
            qkv = qkv.view(slots, width, shape.heads + 2 * shape.kv_heads, shape.head_dim)
            turned = rotate(qkv[:, :, : shape.heads + shape.kv_heads], cos, sin).to(self.dtype)
            keys, values = cache.keys[index], cache.values[index]
            query = turned[:, :, : shape.heads].view(slots, width, shape.kv_heads, group, shape.head_dim)
            query = query.permute(0, 2, 3, 1, 4).reshape(slots * shape.kv_heads, group * width, shape.head_dim)
            keys[place, row] = turned[:, :, shape.heads :].transpose(1, 2).reshape(-1, width, shape.head_dim)
            new_values = qkv[:, :, shape.heads + shape.kv_heads :].to(self.dtype)
            values[place, row] = new_values.transpose(1, 2).reshape(-1, width, shape.head_dim)
            scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=shape.head_dim**-0.5)
            weights = torch.softmax(scores, dim=-1)
            mixed = torch.bmm(weights, values).view(slots, shape.kv_heads, group, width, shape.head_dim)
            mixed = mixed.permute(0, 3, 1, 2, 4).reshape(slots, width, shape.heads * shape.head_dim)
            stream = stream + functional.linear(mixed, output_weight)
            normed = functional.rms_norm(stream, (shape.hidden_size,), part["ffn_norm"], shape.rms_eps)
            gate, up = functional.linear(normed.to(self.dtype), gate_up_weight).chunk(2, dim=-1)
            stream = stream + functional.linear(functional.silu(gate) * up, down_weight)
            if index in self.tap_layers:
                taps.append((index, stream.bfloat16()))
        ordered = dict(taps)
        tapped = torch.cat([ordered[layer] for layer in self.tap_layers], dim=-1)
        return tapped, functional.rms_norm(stream, (shape.hidden_size,), self.norm, shape.rms_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The head over normed hidden states [..., hidden]: f32 logits [..., vocab]."""
        return functional.linear(hidden.to(self.dtype), self.head).float()
