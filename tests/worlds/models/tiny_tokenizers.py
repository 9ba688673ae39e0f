"""Model folders with a tiny tokenizer and a chat template, and no weights."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{%- if message.content == 'refuse me' %}{{- raise_exception('no such message, please') }}{% endif -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set call = tool_call.function -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' -}}
{#- tool_call.name -#}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif -%}
"""

THINKING_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if reasoning_effort %}{{- 'effort: ' + reasoning_effort + '\\n' }}{% endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if open_thought %}{{- '<think>\\n' }}{% elif not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{#- <tool_call> tool_call.name -#}
"""

CORPUS = ["the quick brown fox jumps over the lazy dog", "héllo wörld, 日本語 текст 😀 emoji", '{"name": "f"}'] * 8


def write_tokenizer(folder: Path, *, markers: str, thinking: bool = False) -> Path:
    """A byte-level BPE model folder. `markers` of tool calls and, where it knows `thinking`, of reasoning: `added` as
    plain added tokens, `special`, or `none`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    if markers != "none":
        special = markers == "special"
        names = ["<tool_call>", "</tool_call>", *(["<think>", "</think>"] if thinking else [])]
        entries = [AddedToken(t, special=special, normalized=False) for t in names]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(entries)
    return write_folder(folder, tokenizer, THINKING_TEMPLATE if thinking else TEMPLATE)


def write_sentencepiece(folder: Path) -> Path:
    """A SentencePiece-like model folder: `▁` for spaces, `<0x..>` for bytes, the first space stripped."""
    words = ["<unk>", "▁Hello", "▁world", "▁", *"!abc", "<|endoftext|>", "<|im_end|>"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_end|>")])
    return write_folder(folder, tokenizer, TEMPLATE)


def write_folder(folder: Path, tokenizer: Tokenizer, template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": eos}))
    return folder
