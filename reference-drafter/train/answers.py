"""Answers of the target to many prompts at once, with what training needs of every token.

Owns the batching: sequences that end make room for the next prompts, so that the batch stays full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from target import Target

LOOP_TOKENS = 60
LOOP_PERIOD_MAX_TOKENS = 20


@dataclass
class Sequence:
    """One prompt with its answer.

    taps [tokens, taps * hidden] bf16, and for answer tokens the target's `soft_ids` and `soft_probabilities`
    [answer, k]: its most probable tokens at the place of each answer token.
    The last answer token was never fed to the target, so `taps` has one row less than there are ids.
    """

    prompt_ids: list[int]
    temperature: float
    tag: str
    answer_ids: list[int] = field(default_factory=list)
    taps: list[torch.Tensor] = field(default_factory=list)
    soft_ids: list[torch.Tensor] = field(default_factory=list)
    soft_probabilities: list[torch.Tensor] = field(default_factory=list)


def loops(ids: list[int]) -> bool:
    """Whether the last LOOP_TOKENS ids repeat with a short period: more of it would teach nothing new."""
    if len(ids) < LOOP_TOKENS:
        return False
    tail = ids[-LOOP_TOKENS:]
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_PERIOD_MAX_TOKENS + 1))


def answer(
    target: Target,
    sequences: Iterable[Sequence],
    *,
    slots: int,
    prompt_tokens_max: int,
    answer_tokens_max: int,
    stop_ids: set[int],
    soft: int,
    generator: torch.Generator,
    taps: bool = True,
    stop_at_loops: bool = True,
    free_share: float = 0.125,
) -> Iterator[Sequence]:
    """Yields every sequence once its answer ended: by a stop id (kept), by length, or by a loop.

    `soft` is how many of the most probable tokens are kept per answer token; 0 keeps none.
    """
    waiting = iter(sequences)
    cache = target.cache(slots, prompt_tokens_max + answer_tokens_max)
    running: list[Sequence | None] = [None] * slots
    lengths = torch.zeros(slots, dtype=torch.long)
    last = torch.zeros(slots, dtype=torch.long)
    exhausted = False

    def choose(hidden: torch.Tensor, owners: list[Sequence]) -> torch.Tensor:
        logits = target.logits(hidden)
        chosen = logits.argmax(dim=-1)
        temperatures = torch.tensor([owner.temperature for owner in owners])
        warm = temperatures > 0
        if warm.any():
            probabilities = torch.softmax(logits[warm] / temperatures[warm, None], dim=-1)
            chosen[warm] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        if soft:
            top, ids = logits.topk(soft, dim=-1)
            probabilities = (top - torch.logsumexp(logits, dim=-1, keepdim=True)).exp()
            for row, owner in enumerate(owners):
                owner.soft_ids.append(ids[row])
                owner.soft_probabilities.append(probabilities[row])
        return chosen

    while True:
        free = [slot for slot in range(slots) if running[slot] is None]
        if not exhausted and len(free) >= max(1, int(slots * free_share)):
            entering: list[Sequence] = []
            while len(entering) < len(free):
                sequence = next(waiting, None)
                if sequence is None:
                    exhausted = True
                    break
                if len(sequence.prompt_ids) <= prompt_tokens_max:
                    entering.append(sequence)
            # Prompts of like length run together, so that little of a prefill is padding.
            entering.sort(key=lambda sequence: len(sequence.prompt_ids))
            for begin in range(0, len(entering), 16):
                part = entering[begin : begin + 16]
                places = free[begin : begin + len(part)]
                width = max(len(sequence.prompt_ids) for sequence in part)
                ids = torch.zeros(len(part), width, dtype=torch.long)
                for row, sequence in enumerate(part):
                    ids[row, : len(sequence.prompt_ids)] = torch.tensor(sequence.prompt_ids)
                narrow = target.cache(len(part), width)
                tapped, hidden = target.forward(ids, torch.zeros(len(part), dtype=torch.long), narrow)
                cache.take(torch.tensor(places), narrow)
                ends = torch.tensor([len(sequence.prompt_ids) for sequence in part])
                chosen = choose(hidden[torch.arange(len(part)), ends - 1], part)
                for row, (slot, sequence) in enumerate(zip(places, part, strict=True)):
                    running[slot] = sequence
                    if taps:
                        sequence.taps.append(tapped[row, : ends[row]].clone())
                    sequence.answer_ids.append(int(chosen[row]))
                    lengths[slot], last[slot] = ends[row], chosen[row]
        active = [slot for slot in range(slots) if running[slot] is not None]
        for slot in list(active):
            ids = running[slot].answer_ids
            ended = ids[-1] in stop_ids or len(ids) >= answer_tokens_max
            if ended or (stop_at_loops and len(ids) % 8 == 0 and loops(ids)):
                sequence, running[slot] = running[slot], None
                lengths[slot] = last[slot] = 0
                active.remove(slot)
                yield sequence
        if not active:
            if exhausted:
                return
            continue
        if exhausted and len(active) <= slots // 2:
            # The rest runs in a batch of its own size.
            keep = torch.tensor(active)
            cache = cache.of(keep)
            running, lengths, last, slots = [running[slot] for slot in active], lengths[keep], last[keep], len(active)
            active = list(range(slots))
        tapped, hidden = target.forward(last[:, None], lengths, cache)
        rows = torch.tensor(active)
        chosen = choose(hidden[rows, 0], [running[slot] for slot in active])
        lengths[rows] += 1
        last[rows] = chosen
        for row, slot in enumerate(active):
            if taps:
                running[slot].taps.append(tapped[slot].clone())
            running[slot].answer_ids.append(int(chosen[row]))

