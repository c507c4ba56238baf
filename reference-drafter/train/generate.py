"""Writes the training text: round after round of prompts and the target's answers, until it is stopped.

The target first invents user messages (sampled), then answers all prompts (mostly greedily, as serving is measured).
A round follows from the seed and its number alone, except that passages come from the round before.
Within a round answers are written in the order they end in, a shard at a time, so that training can begin early.
"""

from __future__ import annotations

import argparse
import time
from itertools import chain
from pathlib import Path

import torch

import corpus
from answers import Sequence, answer
from chat import Chat
from prompts import Prompts
from target import Target

INVENTED_TOKENS_MAX = 48
INVENTED_TEMPERATURE = 0.8
PROMPT_TOKENS_MAX = 112
SAMPLED_SHARE = 0.1
SOFT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True, help="for the tokenizer and the chat template")
    parser.add_argument("--tap-layers", type=int, nargs="+", default=[1, 10, 19, 27])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first-round", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=1024, help="prompts of a round")
    parser.add_argument("--shard", type=int, default=200, help="answers of a file")
    parser.add_argument("--answer-tokens", type=int, default=160)
    parser.add_argument("--slots", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    chat = Chat(options.bundle)
    target = Target(options.gguf, options.tap_layers)
    user_turn = chat.user_turn_ids()
    passages: list[str] = []
    for round_number in range(options.first_round, options.first_round + options.rounds):
        prompts = Prompts(options.seed * 100_000 + round_number)
        generator = torch.Generator().manual_seed(options.seed * 100_000 + round_number)
        for text in passages:
            prompts.add_passage(text)
        passages = []
        begin, busy = time.monotonic(), time.process_time()
        wanted = [prompts.next() for _ in range(options.prompts)]
        inventing = [
            Sequence(user_turn + chat.encode(prompt.opener or ""), INVENTED_TEMPERATURE, "invented") for prompt in wanted if prompt.kind == "invented"
        ]
        list(
            answer(
                target,
                inventing,
                slots=options.slots,
                prompt_tokens_max=64,
                answer_tokens_max=INVENTED_TOKENS_MAX,
                stop_ids=chat.eos_token_ids,
                soft=0,
                generator=generator,
                taps=False,
            )
        )
        ready = []
        for prompt in wanted:
            if prompt.kind == "invented":
                invented = inventing.pop(0)
                text = chat.decode((invented.prompt_ids + invented.answer_ids)[len(user_turn) :]).strip()
                ids = chat.ids(text)
            else:
                ids = chat.ids(prompt.text, prompt.system)
            temperature = 0.7 if prompts.random.random() < SAMPLED_SHARE else 0.0
            ready.append(Sequence(ids, temperature, prompt.kind))
        kept: list[Sequence] = []
        shard = 0
        for sequence in chain(
            answer(
                target,
                ready,
                slots=options.slots,
                prompt_tokens_max=PROMPT_TOKENS_MAX,
                answer_tokens_max=options.answer_tokens,
                stop_ids=chat.eos_token_ids,
                soft=SOFT,
                generator=generator,
            ),
            [None],
        ):
            if sequence is not None:
                kept.append(sequence)
                passages.append(chat.decode(sequence.answer_ids).strip())
            if len(kept) == options.shard or (sequence is None and kept):
                corpus.write(options.out / f"{round_number:04}-{shard:02}.safetensors", kept)
                tokens = sum(len(done.answer_ids) for done in kept)
                print(
                    f"round {round_number}, shard {shard}: {len(kept)} answers, {tokens} tokens, {time.monotonic() - begin:.0f} s, "
                    f"{tokens / (time.process_time() - busy):.0f} tokens per processor second",
                    flush=True,
                )
                begin, busy = time.monotonic(), time.process_time()
                shard += 1
                kept = []


if __name__ == "__main__":
    main()
