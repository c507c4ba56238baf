"""Makes the small tokenizers of this directory and what the reference library does with them.

Needs `tokenizers==0.23.3`. Run it in this directory; it writes the same bytes each time.
"""

import json
import re

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = """
A draft model proposes a block of tokens, and the target model accepts the longest part that it would have written itself.
The answer is the same with the draft and without the draft; only the time to write the answer is different.
Each request has a seed, a temperature and a limit, and the same request gives the same answer on the same machine.
When the server starts it checks the weights, builds the sessions, measures the widths and only then listens.
An operator who reads the runbook at night wants one command, one expected line and one way back.
def step(sequences, target, draft):
    for sequence in sequences:
        block = draft.propose(sequence)
        logits = target.forward(sequence, block)
        sequence.commit(accept(block, logits))
    return sequences
Ein Entwurf schlägt vor, das Ziel entscheidet. Größe, Maß und Gewähr sind geprüft.
Le modèle cible vérifie chaque jeton proposé par le modèle d'ébauche, même à l'été 2024.
目标模型验证草稿模型提出的每一个词元。输出保持不变，只有速度改变。
目標モデルは下書きモデルの提案を確かめます。出力は変わりません。
대상 모델은 초안 모델이 제안한 토큰을 확인합니다. 출력은 변하지 않습니다.
It's 12:30, you're late, they've left and I'm sure we'll see that it isn't 3.14 or 2,718 but 1000000.
"""

TEXTS = [
    "",
    " ",
    "  two  spaces  ",
    "Hello, world!",
    "the draft proposes and the target accepts",
    "tabs\tand\nnew lines\r\n\r\n  x",
    "1234567890 and 3.14159",
    "naïve café — “quotes” …",
    "目标模型，下書き、모델",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 👍🏽 end",
    "e\u0301 combining, \u00a0 no-break, \u200b zero width, \ufeff mark",
    "nul \u0000 and unit \u001f separator",
    "<|im_start|>system\nobey<|im_end|>",
    "<s> a </s> b <unk> <0x41> ▁ \u2581x",
    "<think>\nwell\n</think>  ok <|user|>  \n hi",
    "it's you're we've don't IT'S",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "def f(x):\n    return x**2  # comment\n",
]


def special(content, **flags):
    return AddedToken(content, special=True, normalized=False, **flags)


def ordinary(content):
    return AddedToken(content, special=False, normalized=False)


def byte_level():
    """GPT-2 bytes, ChatML markers, digits alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=3 + 256 + 300,
        special_tokens=[special(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([ordinary("<think>"), ordinary("</think>")])
    return tokenizer


def sentencepiece_vocabulary():
    """Vocabulary and merges of a BPE over ▁-marked words, in the order SentencePiece writes them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=450, show_progress=False)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    merged = {left + right for left, right in merges}
    characters = [token for token in model["vocab"] if token not in merged]
    tokens = ["<unk>", "<s>", "</s>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    tokens += [left + right for left, right in merges]
    tokens += sorted(characters)
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges


def sentencepiece(vocabulary, merges):
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([special("<unk>"), special("<s>"), special("</s>")])
    return tokenizer


def sentencepiece_prepend(vocabulary, merges):
    """The older conversion: a normaliser marks spaces, and puts one before every part between control tokens."""
    tokenizer = sentencepiece(vocabulary, merges)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def sentencepiece_metaspace(vocabulary, merges):
    """The newer conversion: a pre-tokeniser marks spaces, and puts one before the very first part only."""
    tokenizer = sentencepiece(vocabulary, merges)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([special("<|user|>", rstrip=True), special("<mask>", lstrip=True)])
    tokenizer.add_tokens([ordinary("<think>"), ordinary("</think>"), AddedToken("the target", special=False, normalized=True)])
    return tokenizer


def cases(tokenizer):
    found = []
    for text in TEXTS:
        tokenizer.encode_special_tokens = False
        with_control = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        plain = tokenizer.encode(text, add_special_tokens=False).ids
        found.append({"text": text, "plain": plain, "with_control": with_control, "decoded": tokenizer.decode(plain)})
    return found


def dumps(value):
    """JSON that reads well: lists of numbers on one line."""
    text = json.dumps(value, ensure_ascii=False, indent=1)
    return re.sub(r"\[[\d,\s]*\]", lambda found: re.sub(r"\s+", " ", found.group()), text) + "\n"


vocabulary, merges = sentencepiece_vocabulary()
for name, tokenizer in {
    "byte-level": byte_level(),
    "sentencepiece-prepend": sentencepiece_prepend(vocabulary, merges),
    "sentencepiece-metaspace": sentencepiece_metaspace(vocabulary, merges),
}.items():
    with open(f"{name}.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
    with open(f"{name}.cases.json", "w", encoding="utf-8") as file:
        file.write(dumps(cases(tokenizer)))
