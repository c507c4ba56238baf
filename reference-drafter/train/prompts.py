"""What the target is asked: templated prompts over topics, tasks and passages, and prompts the target invents itself.

Owns the mixture; everything follows from a seed. Held-out prompts are in heldout.json and never made here.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

# Shares of the kinds of prompt. Invented prompts are the most varied and nearest to what the target was tuned on.
SHARES = {"invented": 0.55, "chat": 0.09, "code": 0.12, "structured": 0.11, "passage": 0.08, "translation": 0.05}
OPENER_SHARES = {"chat": 0.4, "code": 0.22, "structured": 0.2, "passage": 0.18}
# An opener is left out so often, and the target then begins the prompt freely.
FREE_SHARE = 0.15
SYSTEM_SHARE = 0.1


@dataclass
class Prompt:
    """A prompt's kind and text; `opener` is what the target is to complete, where it invents the prompt."""

    kind: str
    text: str = ""
    opener: str | None = None
    system: str | None = None


class Prompts:
    """An endless, seeded supply of prompts; `passages` is filled by the caller with text the target has written."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.parts = json.loads(Path(__file__).with_name("prompts.json").read_text())
        self.passages: list[str] = []

    def next(self) -> Prompt:
        """The next prompt."""
        kind = self.pick(SHARES)
        if kind in ("passage", "translation") and not self.passages:
            kind = "invented"
        prompt = Prompt(kind)
        if kind == "invented":
            opener_kind = self.pick(OPENER_SHARES)
            prompt.opener = "" if self.random.random() < FREE_SHARE else self.random.choice(self.parts["openers"][opener_kind])
            return prompt
        if self.random.random() < SYSTEM_SHARE:
            prompt.system = self.random.choice(self.parts["systems"])
        passage = self.random.choice(self.passages) if self.passages else ""
        sentences = passage.replace("\n", " ").split(". ")
        topic, topic2 = self.random.sample(self.parts["topics"], 2)
        prompt.text = self.random.choice(self.parts[kind]).format(
            topic=topic,
            topic2=topic2,
            task=self.random.choice(self.parts["code_tasks"]),
            language=self.random.choice(self.parts["languages"]),
            passage=passage,
            sentence=self.random.choice(sentences)[:150],
            tongue=self.random.choice(self.parts["tongues"]),
        )
        return prompt

    def pick(self, shares: dict[str, float]) -> str:
        """One key, with the probability that is its value."""
        return self.random.choices(list(shares), weights=list(shares.values()))[0]

    def add_passage(self, text: str) -> None:
        """Keeps the beginning of a text the target has written, to be summarised, rewritten or translated later."""
        words = text.split(" ")[: self.random.randint(30, 75)]
        if len(words) >= 25 and "```" not in text:
            self.passages.append(" ".join(words).strip())
