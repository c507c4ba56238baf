"""The published DFlash2DraftModel layout: config.json and model.safetensors, read and written.

Owns names and shapes of that layout; the drafter's own names differ only where its codebooks are projections.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafter import DraftConfig, Drafter
from target import Geometry

RENAMED = {
    "fc.weight": "fc.weight",
    "hidden_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "hidden_projection.weight": "candidate_selector.hidden_projection.weight",
}
LAYER_RENAMED = {
    "input_layernorm": "input_layernorm.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "self_attn.q_norm": "self_attn.q_norm.weight",
    "self_attn.k_norm": "self_attn.k_norm.weight",
    "gate_proj.weight": "mlp.gate_proj.weight",
    "up_proj.weight": "mlp.up_proj.weight",
    "down_proj.weight": "mlp.down_proj.weight",
}
CODEBOOKS = {
    "predecessor.weight": "candidate_selector.predecessor_codebook",
    "successor.weight": "candidate_selector.successor_codebook",
}


def published_name(name: str) -> str:
    """The layout's name of one of the drafter's parameters."""
    if name.startswith("layers."):
        _, index, rest = name.split(".", 2)
        return f"layers.{index}.{LAYER_RENAMED.get(rest, rest)}"
    return RENAMED[name]


def write(folder: Path, drafter: Drafter, weights: dict[str, torch.Tensor]) -> None:
    """Writes `weights`, named as the drafter's parameters, in bf16; each file appears whole or not at all."""
    shape, config = drafter.shape, drafter.config
    tensors = {}
    for name, value in weights.items():
        if name in CODEBOOKS:
            tensors[CODEBOOKS[name]] = (drafter.embedding @ value.T).bfloat16().contiguous()
        else:
            tensors[published_name(name)] = value.bfloat16().contiguous()
    facts = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        # The GGUF file has it in f32.
        "rms_norm_eps": float(f"{shape.rms_eps:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "is_causal": False,
        "layer_types": ["full_attention"] * config.layers,
        "sliding_window": None,
        "num_target_layers": shape.layers,
        "tie_word_embeddings": True,
        "dflash_config": {
            "block_size": config.block,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": config.tap_layers,
            "conv_kernel_size": config.conv_kernel,
            "conv_group_size": config.conv_group,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_top_k,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors.partial", metadata={"format": "pt"})
    os.replace(folder / "model.safetensors.partial", folder / "model.safetensors")
    (folder / "config.json.partial").write_text(json.dumps(facts, indent=2) + "\n")
    os.replace(folder / "config.json.partial", folder / "config.json")


def config_of(folder: Path) -> DraftConfig:
    """The geometry that a checkpoint's config.json states."""
    facts = json.loads((folder / "config.json").read_text())
    inner = facts["dflash_config"]
    return DraftConfig(
        layers=facts["num_hidden_layers"],
        tap_layers=inner["target_layer_ids"],
        block=inner["block_size"],
        mask_token_id=inner["mask_token_id"],
        conv_kernel=inner["conv_kernel_size"],
        conv_group=inner["conv_group_size"],
        selector_rank=inner["selector_rank"],
        selector_top_k=inner["selector_top_k"],
    )


def read(folder: Path, shape: Geometry, embedding: torch.Tensor) -> Drafter:
    """The drafter of a checkpoint; its codebooks must be projections of the embedding, as this recipe writes them."""
    drafter = Drafter(shape, config_of(folder), embedding)
    tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    wide = embedding.double()
    gram = wide.T @ wide
    weights = {}
    for name in dict(drafter.named_parameters()):
        if name in CODEBOOKS:
            codebook = tensors.pop(CODEBOOKS[name])
            projection = torch.linalg.solve(gram, wide.T @ codebook.double())
            error = (wide @ projection - codebook).norm() / codebook.norm()
            if error > 0.01:
                raise ValueError(f"{CODEBOOKS[name]} of {folder} is no projection of the embedding: error {error:.3f}, up to 0.01 allowed")
            weights[name] = projection.T.float()
        else:
            weights[name] = tensors.pop(published_name(name))
    if tensors:
        raise ValueError(f"{folder} has tensors that the layout does not know: {sorted(tensors)}")
    drafter.load_state_dict(weights)
    return drafter


def with_layers(drafter: Drafter, layers: list[int]) -> Drafter:
    """A drafter of these layers alone, in this order, with everything else as it was."""
    config = replace(drafter.config, layers=len(layers))
    fewer = Drafter(drafter.shape, config, drafter.embedding)
    weights = {}
    for name in fewer.state_dict():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            weights[name] = drafter.state_dict()[f"layers.{layers[int(index)]}.{rest}"]
        else:
            weights[name] = drafter.state_dict()[name]
    fewer.load_state_dict(weights)
    return fewer
