"""Text without taps: one JSON object a line, compressed, small enough to be kept beside the weights.

`pack` writes it from shards; `tap` makes shards of it again with one forward pass, several times cheaper than answering.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import torch

import corpus
from answers import Sequence
from generate import SOFT
from target import Target


def pack(shards: list[Path], out: Path) -> None:
    """Writes the ids of the sequences of shards; the same bytes each time."""
    with out.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=9, mtime=0) as file:
        for path in shards:
            for example in corpus.read(path):
                line = {
                    "kind": example.tag,
                    "prompt_ids": example.ids[: example.prompt_tokens].tolist(),
                    "response_ids": example.ids[example.prompt_tokens :].tolist(),
                }
                file.write((json.dumps(line, separators=(",", ":")) + "\n").encode())


def tap(target: Target, lines: list[dict], folder: Path, tokens_max: int, shard: int, batch: int = 16) -> None:
    """Runs the target over each line's ids, cut to `tokens_max`, and writes shards."""
    sequences = [
        Sequence(line["prompt_ids"], line.get("temperature", 0.0), line.get("kind", "text"), line["response_ids"][: tokens_max - len(line["prompt_ids"])])
        for line in lines
        if len(line["prompt_ids"]) + 4 < tokens_max
    ]
    for number, begin in enumerate(range(0, len(sequences), shard)):
        # Sequences of like length run together, so that little of a pass is padding.
        part = sorted(sequences[begin : begin + shard], key=lambda sequence: len(sequence.prompt_ids) + len(sequence.answer_ids))
        for first in range(0, len(part), batch):
            group = part[first : first + batch]
            fed = [sequence.prompt_ids + sequence.answer_ids[:-1] for sequence in group]
            ids = torch.zeros(len(group), max(map(len, fed)), dtype=torch.long)
            for row, tokens in enumerate(fed):
                ids[row, : len(tokens)] = torch.tensor(tokens)
            taps, hidden = target.forward(ids, torch.zeros(len(group), dtype=torch.long), target.cache(len(group), ids.shape[1]))
            for row, (sequence, tokens) in enumerate(zip(group, fed, strict=True)):
                logits = target.logits(hidden[row, len(sequence.prompt_ids) - 1 : len(tokens)])
                top, top_ids = logits.topk(SOFT, dim=-1)
                sequence.taps = [taps[row, : len(tokens)].clone()]
                sequence.soft_ids = list(top_ids)
                sequence.soft_probabilities = list((top - torch.logsumexp(logits, dim=-1, keepdim=True)).exp())
        corpus.write(folder / f"text-{number:03}.safetensors", part)
        print(f"shard {number}: {len(part)} sequences", flush=True)
        for sequence in part:
            sequence.taps = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write text from shards")
    packing.add_argument("--shards", type=Path, nargs="+", required=True)
    packing.add_argument("--out", type=Path, required=True)
    tapping = commands.add_parser("tap", help="make shards from text")
    tapping.add_argument("--gguf", type=Path, required=True)
    tapping.add_argument("--tap-layers", type=int, nargs="+", default=[1, 10, 19, 27])
    tapping.add_argument("--text", type=Path, required=True)
    tapping.add_argument("--every", type=int, default=1, help="take each n-th line")
    tapping.add_argument("--first", type=int, default=0, help="the first line that is taken")
    tapping.add_argument("--tokens", type=int, default=288, help="longest sequence, prompt included; longer ones are cut")
    tapping.add_argument("--shard", type=int, default=192, help="sequences of a file")
    tapping.add_argument("--threads", type=int, default=1)
    tapping.add_argument("--out", type=Path, required=True, help="folder of the shards")
    options = parser.parse_args()
    if options.command == "pack":
        pack(options.shards, options.out)
        return
    torch.set_num_threads(options.threads)
    with gzip.open(options.text, "rt") as file:
        lines = [json.loads(line) for line in file][options.first :: options.every]
    tap(Target(options.gguf, options.tap_layers), lines, options.out, options.tokens, options.shard)


if __name__ == "__main__":
    main()
