"""Writes the binary seeds: small files that the readers of GGUF, safetensors and ONNX accept.

Run:   python make.py
"""

import json
import struct
from pathlib import Path

HERE = Path(__file__).parent

HIDDEN, VOCABULARY = 2, 128


def write(path, content):
    (HERE / path).write_bytes(content)


# --- safetensors -------------------------------------------------------------------------------------------------------------------------

LAYER = {
    "input_layernorm.weight": [HIDDEN],
    "post_attention_layernorm.weight": [HIDDEN],
    **{f"self_attn.{part}_proj.weight": [HIDDEN, HIDDEN] for part in "qkvo"},
    **{f"mlp.{part}_proj.weight": [HIDDEN, HIDDEN] for part in ("gate", "up", "down")},
}
OUTSIDE = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN]}
INSIDE = {f"model.layers.0.{name}": shape for name, shape in LAYER.items()}


def safetensors(shapes):
    header, data = {}, b""
    for name, shape in shapes.items():
        size = 1
        for dimension in shape:
            size *= dimension
        kind = "F16" if "embed" in name else "BF16" if "mlp" in name else "F32"
        content = bytes(range(1, 5)) * (size if kind == "F32" else (size + 1) // 2)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def hugging_face():
    write("safetensors/whole.safetensors", safetensors(OUTSIDE | INSIDE))
    write("safetensors/one.safetensors", safetensors(OUTSIDE))
    write("safetensors/two.safetensors", safetensors(INSIDE))
    where = {name: "one.safetensors" for name in OUTSIDE} | {name: "two.safetensors" for name in INSIDE}
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    write("safetensors-index/two-files.json", json.dumps(index, indent=1).encode())
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": HIDDEN,
        "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "max_position_embeddings": 64, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 1, "num_hidden_layers": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": True, "vocab_size": VOCABULARY,
    }
    write("checkpoint-config/tiny.json", json.dumps(config, indent=1).encode())
    for name, rope in {
        "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 32},
        "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32},
    }.items():
        write(f"checkpoint-config/{name}.json", json.dumps(config | {"rope_parameters": rope}, indent=1).encode())


# --- GGUF --------------------------------------------------------------------------------------------------------------------------------

# Name, elements of a block, bytes of a block.
F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, BF16 = (0, 1, 4), (1, 1, 2), (2, 32, 18), (3, 32, 20), (6, 32, 22), (7, 32, 24), (8, 32, 34), (30, 1, 2)


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(hidden, kinds):
    tokens = ["<s>", "</s>", "a", "b", "ab", "c", "d", "e"]

    def number(kind, form, value):
        return struct.pack("<I" + form, kind, value)

    def array(kind, values):
        return struct.pack("<IIQ", 9, kind, len(values)) + b"".join(values)

    def string(value):
        return struct.pack("<I", 8) + text(value)

    metadata = {
        "general.architecture": string("llama"),
        "general.license": string("mit"),
        "llama.block_count": number(4, "I", 1),
        "llama.context_length": number(4, "I", 64),
        "llama.embedding_length": number(4, "I", hidden),
        "llama.feed_forward_length": number(4, "I", hidden),
        "llama.attention.head_count": number(4, "I", 1),
        "llama.attention.layer_norm_rms_epsilon": number(6, "f", 1e-5),
        "llama.rope.freq_base": number(6, "f", 10000.0),
        "tokenizer.ggml.model": string("gpt2"),
        "tokenizer.ggml.pre": string("gpt-2"),
        "tokenizer.ggml.tokens": array(8, [text(token) for token in tokens]),
        "tokenizer.ggml.token_type": array(5, [struct.pack("<i", 3 if token.startswith("<") else 1) for token in tokens]),
        "tokenizer.ggml.merges": array(8, [text("a b")]),
        "tokenizer.ggml.bos_token_id": number(4, "I", 0),
        "tokenizer.ggml.eos_token_id": number(4, "I", 1),
        "tokenizer.ggml.add_bos_token": number(7, "B", 1),
    }
    square = [hidden, hidden]
    tensors = {"token_embd.weight": [hidden, len(tokens)], "output_norm.weight": [hidden]}
    tensors |= {f"blk.0.{name}.weight": [hidden] for name in ("attn_norm", "ffn_norm")}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    tensors |= {f"blk.0.{name}.weight": square for name in matrices}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value for key, value in metadata.items())
    data = b""
    for index, (name, shape) in enumerate(tensors.items()):
        kind, elements, size = F32 if len(shape) == 1 else kinds[index % len(kinds)]
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        head += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in shape)
        head += struct.pack("<IQ", kind, len(data))
        data += bytes(count // elements * size)
        data += bytes(-len(data) % 32)
    return head + bytes(-len(head) % 32) + data


# --- ONNX --------------------------------------------------------------------------------------------------------------------------------


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def value_info(name, kind, *dimensions):
    dims = b"".join(field(1, field(1, dim) if isinstance(dim, int) else field(2, dim)) for dim in dimensions)
    return field(1, name) + field(2, field(1, field(1, kind) + field(2, dims)))


def entry(key, value):
    return field(1, key) + field(2, value)


FLOAT, INT64 = 1, 7


def model(nodes, inputs, outputs, initializers, opsets, metadata):
    graph = b"".join(field(1, node) for node in nodes) + field(2, "graph")
    graph += b"".join(field(5, tensor) for tensor in initializers)
    graph += b"".join(field(11, value) for value in inputs) + b"".join(field(12, value) for value in outputs)
    content = field(1, 10) + field(2, "seed") + field(3, "1") + field(7, graph)
    content += b"".join(field(8, (field(1, domain) if domain else b"") + field(2, version)) for domain, version in opsets)
    return content + b"".join(field(14, entry(*pair)) for pair in metadata)


def node(op, domain="", *attributes):
    return field(4, op) + (field(7, domain) if domain else b"") + b"".join(field(5, attribute) for attribute in attributes)


def onnx():
    external = field(1, 25) + field(1, 50) + field(2, FLOAT) + field(8, "weight") + field(14, 1)
    external += b"".join(field(13, entry(*pair)) for pair in (("location", "model.onnx.data"), ("offset", "0"), ("length", "5000")))
    inline = field(1, 2) + field(2, FLOAT) + field(9, bytes(8))
    body = field(1, node("Add")) + field(2, "body")
    inputs = [value_info("input_ids", INT64, "B", "S"), value_info("position_ids", INT64, "B", "S"), value_info("write_indices", INT64, "B"),
              value_info("nonpad_kv_seqlen", INT64, "B"), value_info("logit_indices", INT64, "B", "n")]
    outputs = [value_info("logits", FLOAT, "B", "n", 32), value_info("aux_hidden_states", FLOAT, "B", "S", 32)]
    nodes = []
    for layer in range(2):
        for side in ("key", "value"):
            inputs.append(value_info(f"{side}_cache.{layer}", FLOAT, "B", "MAX", 8))
            outputs.append(value_info(f"updated_{side}_cache.{layer}", FLOAT, "B", "MAX", 8))
        nodes += [node("TensorScatter"), node("Attention"), node("If", "", field(1, "then_branch") + field(20, 5) + field(6, body))]
    write("onnx/target.onnx", model(nodes, inputs, outputs, [external, inline], [("", 24)], [("taps", "0,1")]))


if __name__ == "__main__":
    hugging_face()
    write("gguf/floats.gguf", gguf(HIDDEN, [F32, F16, BF16]))
    write("gguf/quantised.gguf", gguf(32, [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0]))
    onnx()
