"""Trains the drafter on the shards that generate writes, also while it is still writing them.

Owns the loss, the choice of blocks and the optimiser; every so many steps it writes a checkpoint of averaged weights.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import gguf
import torch
from torch.nn import functional

import checkpoint
import corpus
import evaluate
from drafter import DraftConfig, Drafter
from target import Target, geometry_and_embedding

IGNORED = -1


class Pool:
    """The examples at hand; `take` prefers those that were taken least."""

    def __init__(self, folder: Path, generator: torch.Generator) -> None:
        self.folder, self.generator = folder, generator
        self.files: set[Path] = set()
        self.examples: list[corpus.Example] = []
        self.taken = torch.zeros(0)

    def refresh(self) -> None:
        """Adds the shards that appeared since."""
        for path in sorted(self.folder.glob("*.safetensors")):
            if path not in self.files:
                self.files.add(path)
                # An answer of two tokens has no anchor with a label.
                self.examples += [example for example in corpus.read(path) if len(example.ids) >= example.prompt_tokens + 3]
        self.taken = torch.cat((self.taken, torch.zeros(len(self.examples) - len(self.taken))))

    def take(self, count: int) -> list[corpus.Example]:
        """The `count` examples taken least so far, ties at random."""
        order = (self.taken + torch.rand(len(self.taken), generator=self.generator) * 0.9).argsort()[:count]
        self.taken[order] += 1
        return [self.examples[index] for index in order.tolist()]


def batch(examples: list[corpus.Example], anchors: int, width: int, soft: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Taps, random anchors and the labels behind them; labels past an answer's end are IGNORED.

    Anchors lie in the answer; where an answer has fewer places than `anchors`, some are drawn twice.
    """
    longest = max(len(example.ids) for example in examples)
    taps = torch.zeros(len(examples), longest - 1, examples[0].taps.shape[1], dtype=torch.bfloat16)
    starts, labels, previous, soft_ids, soft_probabilities = [], [], [], [], []
    for row, example in enumerate(examples):
        taps[row, : len(example.taps)] = example.taps
        room = len(example.ids) - 1 - example.prompt_tokens
        chosen = torch.randperm(max(room, anchors), generator=generator)[:anchors] % room
        start = chosen + example.prompt_tokens
        place = start[:, None] + torch.arange(1, width)
        inside = place < len(example.ids)
        place = place.clamp(max=len(example.ids) - 1)
        starts.append(start)
        labels.append(torch.where(inside, example.ids[place], IGNORED))
        previous.append(example.ids[place - 1])
        soft_ids.append(example.soft_ids[place - example.prompt_tokens, :soft].long())
        soft_probabilities.append(example.soft_probabilities[place - example.prompt_tokens, :soft].float())
    return {
        "taps": taps,
        "anchors": torch.stack(starts),
        "labels": torch.stack(labels),
        "previous": torch.stack(previous),
        "soft_ids": torch.stack(soft_ids),
        "soft_probabilities": torch.stack(soft_probabilities),
    }


def losses(
    drafter: Drafter, data: dict[str, torch.Tensor], width: int, gamma: float, soft_share: float, columns: torch.Tensor, place_of: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The weighted losses of a batch over the `columns` of the head.

    place_of [vocab]: each id's place in `columns`, or -1.
    `hard` is the cross-entropy of the target's token, `soft` that of the target's most probable tokens,
    `selector` that of the right token among the row's own candidates, given the right predecessor.
    """
    labels = data["labels"].flatten(0, 1)
    anchor_ids = data["previous"][..., 0]
    context = drafter.context(data["taps"])
    hidden = drafter.blocks(context, anchor_ids, data["anchors"], width).flatten(0, 1)[:, 1:]
    rows = torch.where((labels >= 0).flatten())[0]
    hidden, labels = hidden.flatten(0, 1)[rows], labels.flatten()[rows]
    gold = place_of[labels]
    weight = torch.exp(-torch.arange(width - 1) / gamma).expand(data["labels"].flatten(0, 1).shape).flatten()[rows]
    # A label outside the columns has no place to be drafted in.
    weight = weight * (gold >= 0)
    gold = gold.clamp(min=0)
    weight = weight / weight.sum()
    logits = functional.linear(hidden, drafter.embedding[columns])
    with torch.no_grad():
        candidates = logits.topk(drafter.config.selector_top_k, dim=-1).indices
        found = candidates == gold[:, None]
    soft_places = place_of[data["soft_ids"].flatten(0, 2)[rows]]
    soft_mass = data["soft_probabilities"].flatten(0, 2)[rows] * (soft_places >= 0)
    soft_mass = soft_mass / soft_mass.sum(dim=-1, keepdim=True).clamp(min=1e-6)
    # One gather for all: the gradient of each is as large as the logits.
    wanted = torch.cat((gold[:, None], soft_places.clamp(min=0), candidates), dim=1)
    picked = logits.float().log_softmax(dim=-1).gather(1, wanted)
    hard_log, soft_log, unary = picked.split((1, soft_places.shape[1], candidates.shape[1]), dim=1)
    hard = -hard_log[:, 0]
    soft = -(soft_mass * soft_log).sum(dim=-1)
    predecessors = drafter.predecessor(drafter.embedding[data["previous"].flatten()[rows]])
    gates = drafter.hidden_projection(hidden)
    successors = drafter.successor(drafter.embedding[columns])[candidates]
    edges = unary + (successors.float() @ (predecessors * gates).float()[:, :, None])[..., 0]
    chosen = functional.cross_entropy(edges, found.int().argmax(dim=-1), reduction="none")
    reached = weight * found.any(dim=-1)
    main = ((1 - soft_share) * hard + soft_share * soft) * weight
    return {
        "loss": main.sum() + (chosen * reached).sum(),
        "hard": (hard * weight).sum().detach(),
        "selector": ((chosen * reached).sum() / reached.sum()).detach(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--shards", type=Path, required=True, help="folder that generate writes to")
    parser.add_argument("--heldout", type=Path, required=True, help="the file that heldout.py writes")
    parser.add_argument("--vocabulary", type=Path, required=True, help="draft vocabulary: the columns of the loss")
    parser.add_argument("--start", type=Path, help="checkpoint to start from; without it the start is target layers")
    parser.add_argument("--start-layers", type=int, nargs="+", default=[0, 15, 29], help="target layers to start from")
    parser.add_argument("--keep-layers", type=int, nargs="+", help="layers of --start to keep; all without it")
    parser.add_argument("--tap-layers", type=int, nargs="+", default=[1, 10, 19, 27])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--warmup-steps", type=int, default=40)
    parser.add_argument("--decay-steps", type=int, default=0, help="the last steps, in which the rate falls to a twentieth")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--anchors", type=int, default=28)
    parser.add_argument("--short-width", type=int, default=5, help="block width of the steps that are not full")
    parser.add_argument("--short-share", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=3.0)
    parser.add_argument("--soft", type=int, default=8)
    parser.add_argument("--soft-share", type=float, default=0.5)
    parser.add_argument("--average", type=float, default=0.99, help="decay of the averaged weights")
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--evaluate-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", type=Path, help="state.pt of an earlier run with the same geometry")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary = json.loads(options.vocabulary.read_text())
    config = checkpoint.config_of(options.start) if options.start else DraftConfig(len(options.start_layers), options.tap_layers)
    shape, embedding = geometry_and_embedding(gguf.GGUFReader(options.gguf))
    if options.start:
        drafter = checkpoint.read(options.start, shape, embedding)
        if options.keep_layers:
            drafter = checkpoint.with_layers(drafter, options.keep_layers)
    else:
        drafter = Drafter(shape, config, embedding)
        drafter.start_from_target(Target(options.gguf, config.tap_layers), options.start_layers)
    pool = Pool(options.shards, generator)
    heldout = list(corpus.read(options.heldout))
    columns = torch.tensor(vocabulary)
    place_of = torch.full((drafter.shape.vocab_size,), -1)
    place_of[columns] = torch.arange(len(columns))
    parameters = dict(drafter.named_parameters())
    averaged = {name: value.detach().clone() for name, value in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    first = 0
    if options.resume:
        state = torch.load(options.resume, weights_only=True)
        drafter.load_state_dict(state["weights"])
        optimizer.load_state_dict(state["optimizer"])
        averaged, first = state["averaged"], state["step"]
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    sums = {"hard": 0.0, "selector": 0.0}
    for step in range(first, options.steps):
        if step % 10 == 0 or step == first:
            pool.refresh()
            while len(pool.examples) < 64:
                time.sleep(5)
                pool.refresh()
        rate = options.rate * min(1.0, (step - first + 1) / options.warmup_steps)
        if options.decay_steps:
            rate *= max(0.05, min(1.0, (options.steps - step) / options.decay_steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        short = torch.rand((), generator=generator) < options.short_share
        width = options.short_width if short else config.block
        data = batch(pool.take(options.sequences), options.anchors, width, options.soft, generator)
        with torch.autocast("cpu", torch.bfloat16):
            parts = losses(drafter, data, width, options.gamma, options.soft_share, columns, place_of)
        optimizer.zero_grad(set_to_none=True)
        parts["loss"].backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        keep = min(options.average, (step - first + 1) / (step - first + 10))
        torch._foreach_lerp_(list(averaged.values()), [value.detach() for value in parameters.values()], 1 - keep)
        for name in sums:
            sums[name] += float(parts[name])
        last = step + 1 == options.steps
        if (step + 1) % 20 == 0:
            figures = ", ".join(f"{name} {value / 20:.3f}" for name, value in sums.items())
            sums = dict.fromkeys(sums, 0.0)
            print(
                f"step {step + 1}: {figures}, rate {rate:.2e}, {len(pool.examples)} examples taken {pool.taken.mean():.2f} times, "
                f"{time.monotonic() - begin:.0f} s, {time.process_time():.0f} processor seconds",
                flush=True,
            )
        if (step + 1) % options.save_steps == 0 or last:
            state = {"weights": drafter.state_dict(), "optimizer": optimizer.state_dict(), "averaged": averaged, "step": step + 1}
            torch.save(state, options.out / "state.partial")
            os.replace(options.out / "state.partial", options.out / "state.pt")
            checkpoint.write(options.out, drafter, averaged)
        if (step + 1) % options.evaluate_steps == 0 or last:
            now = {name: value.detach().clone() for name, value in parameters.items()}
            drafter.load_state_dict(averaged)
            figures = evaluate.rates(heldout, evaluate.walks(drafter, heldout, config.block, vocabulary))
            print(f"step {step + 1}: held out, block {config.block}: " + ", ".join(f"{tag} {value:.3f}" for tag, value in figures.items()), flush=True)
            drafter.load_state_dict(now)


if __name__ == "__main__":
    main()
