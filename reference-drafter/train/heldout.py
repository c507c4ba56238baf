"""Greedy answers of the target to the held-out prompts of heldout.json, which no training prompt may repeat."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import corpus
from answers import Sequence, answer
from chat import Chat
from target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True, help="for the tokenizer and the chat template")
    parser.add_argument("--tap-layers", type=int, nargs="+", default=[1, 10, 19, 27])
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chat = Chat(options.bundle)
    prompts = json.loads(Path(__file__).with_name("heldout.json").read_text())
    sequences = [Sequence(chat.ids(text), 0.0, tag) for tag, texts in prompts.items() for text in texts]
    list(
        answer(
            Target(options.gguf, options.tap_layers, torch.float32),
            sequences,
            slots=len(sequences),
            prompt_tokens_max=256,
            answer_tokens_max=options.answer_tokens,
            stop_ids=chat.eos_token_ids,
            soft=8,
            generator=torch.Generator(),
            stop_at_loops=False,
        )
    )
    corpus.write(options.out, sequences)


if __name__ == "__main__":
    main()
