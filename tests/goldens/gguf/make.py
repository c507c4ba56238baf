"""Writes dequantise.safetensors: random blocks of every supported tensor type and the values the reference gives for them.

Needs: pip install gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0
Run:   python make.py
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from safetensors.numpy import save_file

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Where the fp16 numbers of a block are: everything else may be any byte.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}

random = np.random.default_rng(20)
tensors = {}
for name in TYPES:
    kind = GGMLQuantizationType[name]
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (512 // elements, size), dtype=np.uint8)
    if name == "F32":
        blocks = random.standard_normal(512).astype(np.float32).view(np.uint8).reshape(blocks.shape)
    if name == "BF16":
        blocks = (random.standard_normal(512).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(blocks.shape)
    for at in HALVES.get(name, []):
        blocks[:, at : at + 2] = random.standard_normal(len(blocks)).astype(np.float16).reshape(-1, 1).view(np.uint8)
    values = quants.dequantize(blocks, kind).reshape(-1)
    assert values.dtype == np.float32 and values.size == 512 and np.isfinite(values).all()
    tensors[f"{name}.blocks"] = blocks.reshape(-1)
    tensors[f"{name}.values"] = values
save_file(tensors, Path(__file__).parent / "dequantise.safetensors")
