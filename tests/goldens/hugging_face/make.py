"""Writes tiny random checkpoints and what Hugging Face transformers computes with them. See README.md for the layout.

Needs: pip install torch==2.14.1 transformers==5.24.0 safetensors==0.8.0 tokenizers==0.23.3 numpy==2.4.6   (the CPU is enough)
Run:   python make.py
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

HERE = Path(__file__).parent
VOCABULARY = 128
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"

SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)


def rope(kind="default", theta=10000.0, **extra):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **extra}}


# Lengths of the sequences, and how the cached run cuts each of them: a first part, then steps of several tokens and of one.
SEQUENCES = [(20, [8, 1, 4, 1, 6]), (9, [2, 1, 6])]

CASES = {
    # Grouped heads, nothing else; two weight files.
    "llama": LlamaConfig(**SHAPE, **rope()),
    # The original context is so short that every part of the passage between frequencies occurs.
    "llama-llama3": LlamaConfig(
        **SHAPE | {"num_hidden_layers": 2, "tie_word_embeddings": True},
        **rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama-linear": LlamaConfig(**SHAPE | {"num_hidden_layers": 2}, attention_bias=True, mlp_bias=True, **rope("linear", factor=4.0)),
    "llama-yarn": LlamaConfig(**SHAPE | {"num_hidden_layers": 2}, **rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    # Window shorter than any prompt; heads wider than hidden size / heads.
    "mistral": MistralConfig(**SHAPE | {"num_hidden_layers": 2}, head_dim=16, sliding_window=5, **rope()),
    # The first layer sees everything, the others a window.
    "qwen2": Qwen2Config(
        **SHAPE | {"tie_word_embeddings": True}, use_sliding_window=True, sliding_window=6, max_window_layers=1, **rope(theta=1000000.0)
    ),
    "qwen3": Qwen3Config(**SHAPE | {"num_hidden_layers": 2}, head_dim=16, **rope(theta=1000000.0)),
    "qwen3-yarn": Qwen3Config(
        **SHAPE | {"num_hidden_layers": 2, "tie_word_embeddings": True},
        head_dim=16,
        attention_bias=True,
        **rope(
            "yarn",
            factor=2.5,
            original_max_position_embeddings=48,
            beta_fast=24.0,
            beta_slow=2.0,
            mscale=1.2,
            mscale_all_dim=0.7,
            truncate=False,
        ),
    ),
}

# Cases whose config.json is rewritten to the form that transformers 4 wrote.
OLD_FORM = ["llama-llama3", "llama-yarn", "qwen2"]


def tokenizer():
    """Byte-level BPE over printable ASCII and a few merges."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("an", "d"), ("Ġ", "and"), ("i", "n"), ("in", "g"), ("o", "r"), ("e", "r")]
    tokens = SPECIAL + letters + ["".join(merge) for merge in merges]
    tokens += [f"<unused{index}>" for index in range(VOCABULARY - len(tokens))]
    result = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return result


def write_text(case, directory):
    text = tokenizer()
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    if case.startswith("llama"):
        text.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    if case == "llama":
        config["chat_template"] = TEMPLATE
    elif case == "llama-llama3":
        config["bos_token"] = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
        config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
        generation |= {"eos_token_id": [2, 4], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    elif case == "qwen2":
        config |= {"bos_token": None, "add_bos_token": False, "chat_template": "the file wins"}
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        generation |= {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.0}
    text.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def to_old_form(path):
    config = json.loads(path.read_text())
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    # Both names of the type key occur in published configurations.
    key = "type" if kind == "yarn" else "rope_type"
    config["rope_scaling"] = None if kind == "default" else {key: kind, **parameters}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    config["transformers_version"] = "4.43.0"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def randomise(model, generator):
    """Weights large enough that every part of the arithmetic shows in the logits."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1.0 + 0.3 * noise
        elif name.endswith("bias"):
            parameter.data = 0.3 * noise
        elif "embed_tokens" in name:
            # As the head of a tied model it sets the size of the logits.
            parameter.data = noise * (0.3 if model.config.tie_word_embeddings else 1.0)
        else:
            parameter.data = noise / parameter.shape[-1] ** 0.5
    model.tie_weights()


def run(model, ids, chunks):
    hidden = {}
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output, index=index: hidden.__setitem__(index, output[0]))
        for index, layer in enumerate(model.model.layers)
    ]
    whole = model(ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    residual = torch.stack([hidden[index].reshape(len(ids), -1) for index in range(len(hidden))])

    cache = DynamicCache(config=model.config)
    parts = [model(part[None], past_key_values=cache, use_cache=True).logits[0] for part in ids.split(chunks)]
    return whole, residual, torch.cat(parts)


def plain_logits(model, ids):
    """What the model would compute if a reader overlooked rope scaling and windows."""
    config = type(model.config)(**model.config.to_dict())
    config.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    config.sliding_window = None
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    return plain(ids[None], use_cache=False).logits[0]


@torch.no_grad()
def make(case, config, seed):
    directory = HERE / case
    shutil.rmtree(directory, ignore_errors=True)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, generator)
    model.save_pretrained(directory, max_shard_size="60KB" if case == "llama" else "1GB")
    write_text(case, directory)
    if case in OLD_FORM:
        to_old_form(directory / "config.json")

    # What is on disk counts, not the model in memory.
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    exact = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float64).eval()
    tensors, noise, effect = {}, 0.0, 0.0
    for index, (length, chunks) in enumerate(SEQUENCES):
        ids = torch.randint(len(SPECIAL), VOCABULARY, (length,), generator=generator)
        logits, residual, cached = run(model, ids, chunks)
        noise = max(noise, *((part.double() - run(exact, ids, chunks)[0]).abs().max().item() for part in (logits, cached)))
        effect = max(effect, (plain_logits(model, ids) - logits).abs().max().item())
        tensors |= {
            f"{index}.input_ids": ids,
            f"{index}.chunks": torch.tensor(chunks),
            f"{index}.logits": logits,
            f"{index}.cached_logits": cached,
            f"{index}.hidden": residual,
        }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "cases.safetensors")
    for path in directory.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{case}: {size} bytes, largest logit {logits.abs().max():.2f}, fp32 noise {noise:.1e}, effect of scaling and windows {effect:.2f}")
    assert noise < 2e-5, "the case is too ill-conditioned for a tolerance of 1e-4"
    assert effect > 0.01 or case in ("llama", "qwen3"), "the case doesn't show what it is there for"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed, (case, config) in enumerate(CASES.items()):
        make(case, config, seed)
