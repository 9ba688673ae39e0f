"""Trains the byte-level BPE of the embedded text model and writes its files with the chat template.

    python -m training.recall.tokenizer --out DIR

The merges are made in two rounds. The first never joins a space to anything; the second only puts a space before a
word or sign that the first has made whole. As the second round's merges rank last, a word falls into the same pieces
after a space, a quotation mark or a line's beginning: copying a made-up name is then copying its tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections import Counter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .filler import any_filler
from .stories import story
from .talk import RunningTalk, text_of
from .tools import text_of_tools
from .words import ALL_WORDS, FIRST_NAMES, any_name

VOCABULARY = 3072
SPACED = 700
CONTEXT = 8192
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
WHOLE_WORDS = ["system", "user", "assistant", "code", "name", "arguments", "get"]
WHOLE_WORDS += ["Remember", "What", "know", "Noted", "Repeat"]
SPACE = "\u0120"  # how byte-level BPE writes the byte 0x20
FIRST_PATTERN = r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def sample_texts(rng: random.Random, count: int) -> list[str]:
    """Texts like those of training: conversations, other talk, stories and names."""
    texts: list[str] = []
    for _ in range(count):
        talk = RunningTalk(rng, rng.choice([1500, 3000, 6000]))
        texts.append(text_of_tools(talk.tools))
        while talk.left > 0:
            texts += [text_of(turn.message) for turn in talk.exchange()]
        texts += [any_filler(rng, 300), story(rng)]
        texts.append("\n".join(any_name(rng) for _ in range(60)))
    texts += ["\n".join(ALL_WORDS + FIRST_NAMES), "\n".join(WHOLE_WORDS * 200)]
    for control in CONTROLS + MARKS:
        texts = [text.replace(control, "\n") for text in texts]
    return texts


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train(texts: list[str]) -> Tokenizer:
    """The tokenizer for these texts; its ids are below `VOCABULARY`."""
    first = Tokenizer(models.BPE())
    first.pre_tokenizer = _splitter(FIRST_PATTERN)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - SPACED - len(CONTROLS + MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    first.train_from_iterator(texts, trainer)
    model = json.loads(first.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    merges = [tuple(merge) for merge in model["merges"]]

    splitter = _splitter(PATTERN)
    counts: Counter[str] = Counter()
    for text in texts:
        for piece, _ in splitter.pre_tokenize_str(text):
            if piece.startswith(SPACE) and piece[1:] in vocabulary and SPACE not in piece[1:]:
                counts[piece[1:]] += 1
    for piece, _ in counts.most_common(SPACED):
        vocabulary[SPACE + piece] = len(vocabulary)
        merges.append((SPACE, piece))

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROLS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the tokenizer's files to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversations", type=int, default=3000, help="how many to train on")
    options = parser.parse_args()
    tokenizer = train(sample_texts(random.Random(options.seed), options.conversations))
    write(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} entries in {options.out}")


if __name__ == "__main__":
    main()
