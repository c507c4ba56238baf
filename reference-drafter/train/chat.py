"""Prompts as the target sees them: its tokenizer and its chat template, from an exported bundle."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import tokenizers


class Chat:
    """Renders messages with the bundle's chat template and turns them into ids."""

    def __init__(self, bundle: Path) -> None:
        facts = json.loads((bundle / "bundle.json").read_text())
        self.tokenizer = tokenizers.Tokenizer.from_file(str(bundle / facts["text"]["tokenizer"]))
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
        self.template = environment.from_string((bundle / facts["text"]["chat_template"]).read_text())
        self.eos_token_ids = set(facts["generation"]["eos_token_ids"])

    def ids(self, user: str, system: str | None = None) -> list[int]:
        """The ids of one user message (and a system message) up to where the assistant begins."""
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": user})
        return self.encode(self.template.render(messages=messages, add_generation_prompt=True))

    def user_turn_ids(self) -> list[int]:
        """The ids up to where a user's message begins: what the target completes to invent a prompt."""
        text = self.template.render(messages=[{"role": "user", "content": "\x00"}], add_generation_prompt=False)
        return self.encode(text[: text.index("\x00")])

    def encode(self, text: str) -> list[int]:
        """The ids of text with special tokens parsed and none added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)
