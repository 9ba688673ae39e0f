"""Trains the byte-level BPE of the vision model and writes its files with the chat template.

python -m training.shapes.tokenizer --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .layout import CONTEXT, CONTROLS, ID_OF, MARKS, MEDIA, VOCABULARY
from .talk import ELSE, SYSTEM_PROMPTS, any_chat, other_talk, text_of

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def sample_texts(rng: random.Random, count: int) -> list[str]:
    """Chats without their pictures, and other talk."""
    texts = ["user assistant system seconds", ELSE, *SYSTEM_PROMPTS]
    for _ in range(count):
        texts += [text_of(message, lambda _: "<0.5 seconds>") for message in any_chat(rng).messages]
        texts.append(other_talk(rng, 200))
    return [re.sub(r"<\|[a-z_]+\|>", "\n", text) for text in texts]


def train(texts: list[str]) -> Tokenizer:
    """The tokenizer for these texts; its ids are below `VOCABULARY`, as `ID_OF` has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ID_OF),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROLS + MEDIA])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    if any(tokenizer.token_to_id(text) != place for text, place in ID_OF.items()):
        raise ValueError(f"the texts gave {tokenizer.get_vocab_size()} entries, not {VOCABULARY}")
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
    parser.add_argument("--chats", type=int, default=3000, help="how many to train on")
    options = parser.parse_args()
    tokenizer = train(sample_texts(random.Random(options.seed), options.chats))
    write(tokenizer, options.out)
    print(f"{tokenizer.get_vocab_size()} entries in {options.out}")


if __name__ == "__main__":
    main()
