"""A model folder whose tokenizer and template are of the Harmony format, reduced to it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .tiny_tokenizers import CORPUS, write_folder

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")

TEMPLATE = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>namespace functions { ' }}
{%- for tool in tools %}{{- 'type ' + tool.function.name + ';' }}{% endfor %}{{- ' }<|end|>' }}{% endif -%}
{%- set ns = namespace(called='') -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- if message.content and message.thinking %}{{- raise_exception('either content or thinking') }}{% endif -%}
{%- set thought = message.thinking or message.content -%}
{%- if thought %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif -%}
{%- set ns.called = message.tool_calls[0].function.name -%}
{{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' -}}
{{- (message.tool_calls[0].function.arguments | tojson) + '<|call|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{%- if not ns.called %}{{- raise_exception('no call before') }}{% endif -%}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- (message.content | tojson) + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif -%}
"""


def write_harmony(folder: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    names = ("<|endoftext|>", "<|im_end|>", *MARKERS)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    write_folder(folder, tokenizer, TEMPLATE)
    ends = [tokenizer.token_to_id(name) for name in ("<|return|>", "<|endoftext|>", "<|call|>")]
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "eos_token_id": ends}))
    return folder
