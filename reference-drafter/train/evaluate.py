"""Acceptance as serving meets it: the greedy walk along held-out greedy answers, in tokens per target pass.

The greedy target reproduces its answer whatever is drafted, so that the answer alone decides what is accepted.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch

import checkpoint
import corpus
from drafter import Drafter
from target import geometry_and_embedding


@dataclass
class Walk:
    """Target passes of one answer, and the tokens they gave; the prompt's pass and its token do not count."""

    passes: int = 0
    tokens: int = 0


class Head:
    """The drafter's head over all ids or over a draft vocabulary, and the selector's codebooks."""

    def __init__(self, drafter: Drafter, vocabulary: list[int] | None) -> None:
        ids = torch.arange(drafter.shape.vocab_size) if vocabulary is None else torch.tensor(vocabulary)
        self.ids = ids
        self.weight = drafter.embedding[ids].bfloat16()
        self.predecessors = drafter.embedding @ drafter.predecessor.weight.T
        self.successors = drafter.embedding @ drafter.successor.weight.T
        self.top_k = drafter.config.selector_top_k
        self.hidden_projection = drafter.hidden_projection.weight

    def path(self, hidden: torch.Tensor, anchor_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The greedy selector path and the unary argmax, [blocks, slots] each, from hidden [blocks, width, hidden]."""
        rows = hidden[:, 1:]
        logits = torch.nn.functional.linear(rows.bfloat16(), self.weight).float()
        top, places = logits.topk(self.top_k, dim=-1)
        candidates = self.ids[places]
        gates = rows @ self.hidden_projection.T
        previous, path = anchor_ids, []
        for slot in range(rows.shape[1]):
            wanted = self.predecessors[previous] * gates[:, slot]
            edges = top[:, slot] + (self.successors[candidates[:, slot]] @ wanted[:, :, None])[..., 0]
            previous = candidates[:, slot].gather(1, edges.argmax(dim=-1, keepdim=True))[:, 0]
            path.append(previous)
        return torch.stack(path, dim=1), candidates[..., 0]


@torch.inference_mode()
def walks(
    drafter: Drafter, examples: list[corpus.Example], width: int, vocabulary: list[int] | None = None, unary: bool = False
) -> list[Walk]:
    """One walk per example, with blocks of `width` tokens (the anchor included)."""
    head = Head(drafter, vocabulary)
    lengths = [len(example.ids) for example in examples]
    taps = torch.zeros(len(examples), max(lengths) - 1, examples[0].taps.shape[1], dtype=torch.bfloat16)
    ids = torch.zeros(len(examples), max(lengths), dtype=torch.long)
    for row, example in enumerate(examples):
        taps[row, : lengths[row] - 1] = example.taps
        ids[row, : lengths[row]] = example.ids
    results = [Walk() for _ in examples]
    with torch.autocast("cpu", torch.bfloat16):
        context = drafter.context(taps)
    places = [example.prompt_tokens for example in examples]
    while True:
        # The prompt's own pass gives the first answer token; every later pass has an anchor to draft behind.
        going = [row for row, place in enumerate(places) if place < lengths[row] - 1]
        if not going:
            return results
        rows, anchors = torch.tensor(going), torch.tensor([places[row] for row in going])
        anchor_ids = ids[rows, anchors]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = drafter.blocks([(k[rows], v[rows]) for k, v in context], anchor_ids[:, None], anchors[:, None], width)
        path, argmax = head.path(hidden[:, 0].float(), anchor_ids)
        for row, drafts in zip(going, (argmax if unary else path).tolist(), strict=True):
            truth = ids[row, places[row] + 1 : lengths[row]].tolist()
            accepted = 0
            while accepted < min(len(drafts), len(truth)) and drafts[accepted] == truth[accepted]:
                accepted += 1
            emitted = min(accepted + 1, len(truth))
            results[row].passes += 1
            results[row].tokens += emitted
            places[row] += emitted


def rates(examples: list[corpus.Example], results: list[Walk]) -> dict[str, float]:
    """Tokens per target pass of every tag and of all."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for example, walk in zip(examples, results, strict=True):
        for tag in (example.tag, "all"):
            sums[tag][0] += walk.tokens
            sums[tag][1] += walk.passes
    return {tag: tokens / passes for tag, (tokens, passes) in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder with config.json and model.safetensors")
    parser.add_argument("--heldout", type=Path, required=True, help="the file that heldout.py writes")
    parser.add_argument("--vocabulary", type=Path, help="draft vocabulary; all ids without it")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 5, 4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--unary", action="store_true", help="propose the unary argmax instead of the selector's path")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    drafter = checkpoint.read(options.checkpoint, *geometry_and_embedding(gguf.GGUFReader(options.gguf)))
    examples = list(corpus.read(options.heldout))
    vocabulary = json.loads(options.vocabulary.read_text()) if options.vocabulary else None
    for width in options.widths:
        figures = rates(examples, walks(drafter, examples, width, vocabulary, options.unary))
        print(f"block {width}: " + ", ".join(f"{tag} {value:.3f}" for tag, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
