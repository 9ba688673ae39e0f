"""Chat templates that forget, each in one way of published ones, and folders of models with them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from satchel.api.text.templates.habits import TemplateHabits

from .tiny_tokenizers import write_folder

SYSTEM = "{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content }}{% endif -%}"
TOOLS = "{%- if tools %}{{ tools | tojson }}{% endif -%}"
LAST_USER = """
{%- set ns = namespace(last=0) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}"""
CALLS = "{{ message.tool_calls | tojson if message.tool_calls else '' }}"
THOUGHT = "{{ '<think>\n' + message.reasoning_content + '\n</think>\n' }}"
ASKS = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"


def messages(before: str = "") -> str:
    """Every message but the system's, with something before what it says."""
    return (
        LAST_USER
        + "{%- for message in messages if message.role != 'system' -%}{{ '<|im_start|>' + message.role + '\n' -}}"
        + before
        + "{{- message.content }}"
        + CALLS
        + "{%- endfor -%}"
    )


def thinking(where: str) -> str:
    return "{%- if message.reasoning_content and " + where + " %}" + THOUGHT + "{% endif -%}"


LATER = "messages.index(message) > ns.last"
DATE = "{{ 'Today: ' + strftime_now('%d %b %Y') }}"
OPENS = ASKS.replace("assistant\n", "assistant\n<think>\n")

TEMPLATES: dict[str, tuple[str, TemplateHabits, str]] = {
    "keeps all": (SYSTEM + TOOLS + messages(thinking("true")) + ASKS, TemplateHabits(), ""),
    "drops thinking": (
        SYSTEM + TOOLS + messages(thinking(LATER)) + OPENS,
        TemplateHabits(drops_thinking=True),
        "<think>\n",
    ),
    "keeps thinking if asked": (
        SYSTEM + TOOLS + messages(thinking(f"({LATER} or (clear_thinking is defined and not clear_thinking))")) + ASKS,
        TemplateHabits(drops_thinking=True, switch='{"clear_thinking": false}'),
        "",
    ),
    "drops thinking at once": (
        SYSTEM + TOOLS + messages() + OPENS,
        TemplateHabits(drops_thinking=True, drops_steps=True),
        "<think>\n",
    ),
    "no thinking, said so": (
        SYSTEM + TOOLS + messages(thinking(LATER)) + ASKS.replace("assistant\n", "assistant\n<think></think>"),
        TemplateHabits(drops_thinking=True),
        "<think></think>",
    ),
    "moves the system's message": (
        TOOLS
        + messages(
            "{%- if messages.index(message) == ns.last %}{{ messages[0].content }}{% endif -%}" + thinking("true")
        )
        + ASKS,
        TemplateHabits(moves=("system message",)),
        "",
    ),
    "moves the tools": (
        SYSTEM
        + messages(
            "{%- if messages.index(message) == ns.last and tools %}{{ tools | tojson }}{% endif -%}" + thinking("true")
        )
        + ASKS,
        TemplateHabits(moves=("tools",)),
        "",
    ),
    "changes the last user message": (
        SYSTEM
        + TOOLS
        + messages("{%- if messages.index(message) == ns.last %}{{ 'Now: ' }}{% endif -%}" + thinking("true"))
        + ASKS,
        TemplateHabits(rewrites=True),
        "",
    ),
    "changes all": (
        "{{ messages | length }}" + SYSTEM + messages(thinking("true")) + ASKS,
        TemplateHabits(unstable=True),
        "",
    ),
    "shows the date": (SYSTEM + DATE + TOOLS + messages(thinking("true")) + ASKS, TemplateHabits(dated=True), ""),
    "takes no system's message": (
        "{%- if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif -%}"
        + TOOLS
        + messages(thinking(LATER))
        + ASKS,
        TemplateHabits(drops_thinking=True),
        "",
    ),
    "refuses all": ("{{ raise_exception('nothing will do') }}", TemplateHabits(), ""),
    "is wrong": ("{{ messages[0].nothing.at_all }}", TemplateHabits(), ""),
}


def write_template(folder: Path, template: str) -> Path:
    """A model folder with a tokenizer of single bytes and the markers of these templates."""
    tokenizer = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    return write_folder(folder, tokenizer, template)
