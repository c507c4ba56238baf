"""The DFlash 2 drafter in PyTorch: many blocks of many sequences in one pass.

Owns the drafter's arithmetic, for training and for evaluation alike, and its start from the target or from a checkpoint.
The codebooks are trained as projections of the target's frozen embedding; `export` writes them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from target import Geometry, Target, rotary_tables, rotate


@dataclass(frozen=True)
class DraftConfig:
    """Geometry that the drafter does not share with its target."""

    layers: int = 3
    tap_layers: list[int] = field(default_factory=lambda: [1, 10, 19, 27])
    block: int = 8
    mask_token_id: int = 16
    conv_kernel: int = 2
    conv_group: int = 16
    selector_rank: int = 64
    selector_top_k: int = 16


class DynamicConv(nn.Module):
    """Grouped dynamic causal convolution over a block's rows, before (side 0) and after (side 1) a sublayer."""

    def __init__(self, hidden: int, config: DraftConfig) -> None:
        super().__init__()
        self.kernel, self.group = config.conv_kernel, config.conv_group
        base = torch.zeros(2, self.kernel, hidden)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden, 2 * self.kernel * hidden // self.group, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        """[blocks, width, 2, kernel, groups] from the sublayer's input."""
        return self.kernel_projection(x).unflatten(-1, (2, self.kernel, -1))

    def forward(self, x: torch.Tensor, coefficients: torch.Tensor, side: int) -> torch.Tensor:
        grouped = x.unflatten(-1, (-1, self.group))
        result = torch.zeros_like(grouped)
        for tap in range(self.kernel):
            weight = self.base_kernel[side, tap].unflatten(-1, (-1, self.group)) + coefficients[:, :, side, tap, :, None]
            result = result + weight * functional.pad(grouped, (0, 0, 0, 0, tap, 0))[:, : x.shape[1]]
        return result.flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """Attention of block rows to the context before their anchor and to their own block."""

    def __init__(self, shape: Geometry) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))

    def normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of every head [..., heads, head_dim]."""
        return functional.rms_norm(x.float(), (self.shape.head_dim,), weight, self.shape.rms_eps)

    def context(self, fused: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [sequences, kv_heads, tokens, head_dim] of context rows [sequences, tokens, hidden]."""
        split = (self.shape.kv_heads, self.shape.head_dim)
        keys = self.normed(self.k_proj(fused).unflatten(-1, split), self.k_norm)
        keys = rotate(keys, cos[:, None], sin[:, None]).transpose(1, 2).to(torch.bfloat16)
        return keys, self.v_proj(fused).unflatten(-1, split).transpose(1, 2).to(torch.bfloat16)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        context_mask: torch.Tensor,
    ) -> torch.Tensor:
        """x [sequences, blocks, width, hidden]; cos, sin [sequences, blocks, width, head_dim / 2];
        context_mask [sequences, blocks, tokens] is 0 or -inf."""
        shape = self.shape
        sequences, blocks, width, _ = x.shape
        group, head_dim = shape.heads // shape.kv_heads, shape.head_dim
        cos, sin = cos[..., None, :], sin[..., None, :]
        query = rotate(self.normed(self.q_proj(x).unflatten(-1, (shape.heads, head_dim)), self.q_norm), cos, sin)
        keys = rotate(self.normed(self.k_proj(x).unflatten(-1, (shape.kv_heads, head_dim)), self.k_norm), cos, sin)
        values = self.v_proj(x).unflatten(-1, (shape.kv_heads, head_dim))
        # [sequences, kv_heads, blocks, group * width, head_dim]
        query = query.view(sequences, blocks, width, shape.kv_heads, group, head_dim).permute(0, 3, 1, 4, 2, 5)
        query = query.reshape(sequences, shape.kv_heads, blocks, group * width, head_dim).to(torch.bfloat16)
        keys = keys.permute(0, 3, 1, 2, 4).to(torch.bfloat16)
        values = values.permute(0, 3, 1, 2, 4).to(torch.bfloat16)
        far = query.flatten(2, 3) @ context[0].transpose(2, 3)
        far = far.unflatten(2, (blocks, group * width)) * head_dim**-0.5 + context_mask[:, None, :, None]
        near = (query @ keys.transpose(3, 4)) * head_dim**-0.5
        tokens = far.shape[-1]
        weights = torch.softmax(torch.cat((far, near), dim=-1).float(), dim=-1).to(torch.bfloat16)
        mixed = (weights[..., :tokens].flatten(2, 3) @ context[1]).unflatten(2, (blocks, group * width))
        mixed = mixed + weights[..., tokens:] @ values
        mixed = mixed.view(sequences, shape.kv_heads, blocks, group, width, head_dim).permute(0, 2, 4, 1, 3, 5)
        return self.o_proj(mixed.reshape(sequences, blocks, width, shape.heads * head_dim))


class Layer(nn.Module):
    """One draft layer: convolved attention and convolved feed-forward, each behind an RMS norm."""

    def __init__(self, shape: Geometry, config: DraftConfig) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = nn.Parameter(torch.ones(shape.hidden_size))
        self.post_attention_layernorm = nn.Parameter(torch.ones(shape.hidden_size))
        self.self_attn = Attention(shape)
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)
        self.attention_conv = DynamicConv(shape.hidden_size, config)
        self.mlp_conv = DynamicConv(shape.hidden_size, config)

    def convolved(self, conv: DynamicConv, x: torch.Tensor, coefficients: torch.Tensor, side: int) -> torch.Tensor:
        """The convolution within every block of x [sequences, blocks, width, hidden]."""
        return conv(x.flatten(0, 1), coefficients, side).view(x.shape)

    def forward(self, x: torch.Tensor, cos, sin, context, context_mask) -> torch.Tensor:
        size, eps = (self.shape.hidden_size,), self.shape.rms_eps
        h = functional.rms_norm(x, size, self.input_layernorm, eps)
        coefficients = self.attention_conv.coefficients(h.flatten(0, 1))
        h = self.convolved(self.attention_conv, h, coefficients, 0)
        h = self.self_attn(h, cos, sin, context, context_mask)
        x = x + self.convolved(self.attention_conv, h, coefficients, 1)
        h = functional.rms_norm(x, size, self.post_attention_layernorm, eps)
        coefficients = self.mlp_conv.coefficients(h.flatten(0, 1))
        h = self.convolved(self.mlp_conv, h, coefficients, 0)
        h = self.down_proj(functional.silu(self.gate_proj(h)) * self.up_proj(h))
        return x + self.convolved(self.mlp_conv, h, coefficients, 1)


class Drafter(nn.Module):
    """The trained weights; the embedding and head are the target's and frozen."""

    def __init__(self, shape: Geometry, config: DraftConfig, embedding: torch.Tensor, positions: int = 1024) -> None:
        super().__init__()
        self.shape, self.config = shape, config
        hidden, rank = shape.hidden_size, config.selector_rank
        self.fc = nn.Linear(len(config.tap_layers) * hidden, hidden, bias=False)
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.layers = nn.ModuleList(Layer(shape, config) for _ in range(config.layers))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        self.predecessor = nn.Linear(hidden, rank, bias=False)
        self.successor = nn.Linear(hidden, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=0.02)
        nn.init.normal_(self.predecessor.weight, std=0.02)
        nn.init.zeros_(self.successor.weight)
        self.register_buffer("embedding", embedding, persistent=False)
        cos, sin = rotary_tables(shape.head_dim, shape.rope_theta, positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def start_from_target(self, target: Target, layers: list[int]) -> None:
        """Copies target layers into the draft layers, the final norm, and lets `fc` pass the last tap."""
        hidden = self.shape.hidden_size
        with torch.no_grad():
            self.norm.copy_(target.norm)
            self.fc.weight.normal_(std=0.002)
            self.fc.weight[:, -hidden:] += torch.eye(hidden)
            for layer, source in zip(self.layers, layers, strict=True):
                part = target.layers[source]
                layer.input_layernorm.copy_(part["attn_norm"])
                layer.post_attention_layernorm.copy_(part["ffn_norm"])
                attention = layer.self_attn
                for module, name in (
                    (attention.q_proj, "attn_q"), (attention.k_proj, "attn_k"), (attention.v_proj, "attn_v"),
                    (attention.o_proj, "attn_output"), (layer.gate_proj, "ffn_gate"), (layer.up_proj, "ffn_up"),
                    (layer.down_proj, "ffn_down"),
                ):
                    module.weight.copy_(part[name])

    def context(self, taps: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every layer's context keys and values from taps [sequences, tokens, taps * hidden] at positions 0.."""
        fused = functional.rms_norm(
            self.fc(taps).float(), (self.shape.hidden_size,), self.hidden_norm, self.shape.rms_eps
        )
        cos, sin = self.cos[: taps.shape[1]], self.sin[: taps.shape[1]]
        return [layer.self_attn.context(fused, cos, sin) for layer in self.layers]

    def blocks(
        self, context: list[tuple[torch.Tensor, torch.Tensor]], anchor_ids: torch.Tensor, anchors: torch.Tensor, width: int
    ) -> torch.Tensor:
        """The final normed hidden states [sequences, blocks, width, hidden] of blocks that begin at `anchors`.

        anchor_ids, anchors: [sequences, blocks]; a block sees the context rows before its anchor.
        """
        tokens = context[0][0].shape[2]
        mask = torch.where(torch.arange(tokens) < anchors[..., None], 0.0, float("-inf")).to(torch.bfloat16)
        positions = anchors[..., None] + torch.arange(width)
        cos, sin = self.cos[positions], self.sin[positions]
        ids = torch.full((*anchors.shape, width), self.config.mask_token_id)
        ids[..., 0] = anchor_ids
        x = self.embedding[ids]
        for layer, part in zip(self.layers, context, strict=True):
            x = layer(x, cos, sin, part, mask)
        return functional.rms_norm(x.float(), (self.shape.hidden_size,), self.norm, self.shape.rms_eps)
