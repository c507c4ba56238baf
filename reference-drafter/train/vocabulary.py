"""The draft vocabulary: which token ids the drafter's head covers.

Every id the target may always need (control ids that occur, single bytes, digits, white space, punctuation),
then the most frequent ids of the self-generated answers, then the ids that the tokenizer merged first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import unicodedata
from collections import Counter
from pathlib import Path

import corpus
from chat import Chat


def always(chat: Chat) -> list[int]:
    """Ids that are covered whatever the text: the end marker, bytes, and tokens without a letter of up to 2 characters."""
    ids = set(chat.eos_token_ids)
    for token, number in chat.tokenizer.get_vocab(with_added_tokens=False).items():
        text = chat.tokenizer.decode([number], skip_special_tokens=False)
        stripped = text.strip()
        if len(token) == 1 or not stripped or stripped.isdigit():
            ids.add(number)
        elif len(stripped) == 1 and unicodedata.category(stripped)[0] in "PS":
            ids.add(number)
    return sorted(ids)


def shortlist(fixed: list[int], counts: Counter[int], vocab_size: int, size: int) -> list[int]:
    """`size` ascending ids: the fixed ones, then by count, then by id (byte-pair merges come in order of frequency)."""
    chosen = dict.fromkeys(fixed)
    ranked = sorted(counts, key=lambda number: (-counts[number], number))
    for number in [*ranked, *range(17, vocab_size)]:
        if len(chosen) >= size:
            break
        chosen[number] = None
    return sorted(chosen)


def coverage(ids: list[int], counts: Counter[int]) -> float:
    """The share of counted tokens that `ids` covers."""
    return sum(counts[number] for number in ids) / counts.total()


def answer_counts(paths: list[Path]) -> Counter[int]:
    """How often each id occurs in the answers of corpus files and of `.jsonl.gz` text."""
    counts: Counter[int] = Counter()
    for path in paths:
        if path.suffix == ".gz":
            with gzip.open(path, "rt") as file:
                for line in file:
                    counts.update(json.loads(line)["response_ids"])
        else:
            for example in corpus.read(path):
                counts.update(example.ids[example.prompt_tokens :].tolist())
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="corpus files or .jsonl.gz text to count")
    parser.add_argument("--heldout", type=Path, required=True, help="corpus file whose coverage is reported")
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    chat = Chat(options.bundle)
    vocab_size = chat.tokenizer.get_vocab_size()
    counts, heldout = answer_counts(options.text), answer_counts([options.heldout])
    fixed = always(chat)
    print(f"{len(counts)} of {vocab_size} ids occur in {counts.total()} tokens; {len(fixed)} ids are fixed")
    for size in sorted({2048, 4096, 6144, 8192, 12288, 16384, options.size}):
        ids = shortlist(fixed, counts, vocab_size, size)
        print(f"{size:6} ids cover {coverage(ids, heldout):.2%} of held-out tokens, {coverage(ids, counts):.2%} of text")
    options.out.write_text(json.dumps(shortlist(fixed, counts, vocab_size, options.size)) + "\n")


if __name__ == "__main__":
    main()
