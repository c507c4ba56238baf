"""The file of generated text: sequences in one safetensors file, a flat row per token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from answers import Sequence


@dataclass
class Example:
    """One sequence to learn from: ids [tokens], taps [tokens - 1, taps * hidden], soft targets of the answer."""

    ids: torch.Tensor
    taps: torch.Tensor
    prompt_tokens: int
    soft_ids: torch.Tensor
    soft_probabilities: torch.Tensor
    tag: str


def write(path: Path, sequences: list[Sequence]) -> None:
    """Writes sequences with their taps and soft targets; the file appears whole or not at all."""
    tensors = {
        "ids": torch.tensor([t for s in sequences for t in s.prompt_ids + s.answer_ids], dtype=torch.int32),
        "taps": torch.cat([rows for s in sequences for rows in s.taps]),
        "prompt_tokens": torch.tensor([len(s.prompt_ids) for s in sequences], dtype=torch.int32),
        "answer_tokens": torch.tensor([len(s.answer_ids) for s in sequences], dtype=torch.int32),
        "soft_ids": torch.stack([row for s in sequences for row in s.soft_ids]).int(),
        "soft_probabilities": torch.stack([row for s in sequences for row in s.soft_probabilities]).half(),
    }
    aside = path.with_suffix(".partial")
    save_file(tensors, aside, metadata={"tags": ",".join(s.tag for s in sequences)})
    os.replace(aside, path)


def read(path: Path) -> Iterator[Example]:
    """Yields the sequences of a file; tensors share the file's mapping."""
    with safe_open(path, "pt") as file:
        tags = file.metadata()["tags"].split(",")
    tensors = load_file(path)
    token = row = place = 0
    for index, tag in enumerate(tags):
        prompt, answer = int(tensors["prompt_tokens"][index]), int(tensors["answer_tokens"][index])
        total = prompt + answer
        yield Example(
            ids=tensors["ids"][token : token + total].long(),
            taps=tensors["taps"][row : row + total - 1],
            prompt_tokens=prompt,
            soft_ids=tensors["soft_ids"][place : place + answer],
            soft_probabilities=tensors["soft_probabilities"][place : place + answer],
            tag=tag,
        )
        token, row, place = token + total, row + total - 1, place + answer
