"""Writes dequantise.safetensors, tiny-llama.gguf, sentencepiece.gguf and sentencepiece.json. See README.md.

Needs: pip install gguf==0.19.0 numpy==2.4.6 safetensors==0.8.0 sentencepiece==0.2.3
Run:   python make.py
"""

import io
import json
from pathlib import Path

import numpy as np
import sentencepiece
from gguf import GGMLQuantizationType, GGUFWriter, MODEL_ARCH, TokenType, get_tensor_name_map, quants
from gguf.constants import GGML_QUANT_SIZES, RopeScalingType
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
# Where the fp16 numbers of a block are: everything else may be any byte.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}


def dequantise():
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
    save_file(tensors, HERE / "dequantise.safetensors")
    (HERE / "dequantise.safetensors").chmod(0o644)


def tiny_llama():
    """The golden checkpoint llama-linear, as the converters of the GGUF world write it."""
    source = HERE.parent / "hugging_face" / "llama-linear"
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    writer = GGUFWriter(HERE / "tiny-llama.gguf", "llama")
    writer.add_name("Tiny Llama")
    writer.add_license("mit")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_scaling_type(RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["factor"])
    writer.add_vocab_size(config["vocab_size"])

    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    unused = {token for token in tokens if token.startswith("<unused")}
    types = [TokenType.CONTROL if token in special else TokenType.UNUSED if token in unused else TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)

    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in sorted(load_file(source / "model.safetensors").items()):
        # Rows of a head that turn together, half a head apart, become neighbours.
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# The sentences that aren't English bring letters into the vocabulary, but not all of those in the cases below.
SENTENCES = [
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness,",
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness,",
    "it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before us.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse,",
    "and nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.",
    "def main():\n    for i in range(10):\n        print(i, i * 2)\n",
    "Über allen Gipfeln ist Ruh, in allen Wipfeln spürest du kaum einen Hauch.",
    "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se fermaient si vite",
    "吾輩は猫である。名前はまだ無い。",
    "1 2 3 4 5 6 7 8 9 0 1905 2026 3.14159",
]


def sentencepiece_tokenizer():
    """A tokenizer trained with the settings of Llama's, and what the library encodes with it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=640,
        hard_vocab_limit=False,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=0.995,
        num_threads=1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    size = processor.get_piece_size()
    types = []
    for index in range(size):
        if processor.is_unknown(index):
            types.append(TokenType.UNKNOWN)
        elif processor.is_control(index):
            types.append(TokenType.CONTROL)
        elif processor.is_byte(index):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    writer = GGUFWriter(HERE / "sentencepiece.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([processor.id_to_piece(index) for index in range(size)])
    writer.add_token_scores([processor.get_score(index) for index in range(size)])
    writer.add_token_types(types)
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    reference = json.loads((HERE.parent / "smollm2-135m" / "tokenizer.json").read_text())
    texts = SENTENCES + [case["text"] for case in reference]
    texts += ["", " ", "   ", "a", "▁", "a▁b", "\n\n\n", "the the  the   the", "</s> and <unk>", "<0x0A>", "wiswisdomdom", "ittttwas"]
    cases = [{"text": text, "ids": processor.encode(text)} for text in texts]
    (HERE / "sentencepiece.json").write_text(json.dumps(cases, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    dequantise()
    tiny_llama()
    sentencepiece_tokenizer()
