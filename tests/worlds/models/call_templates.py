"""Chat templates that write tool calls as families of models do, reduced to that."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .tiny_tokenizers import write_folder

_HEAD = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
_TAIL = "{{- '<|im_end|>\\n' }}{%- endfor %}"
_ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
_THINK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"

HERMES = """
{%- for tool_call in message.tool_calls or [] %}{%- set tool_call = tool_call.function -%}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{%- endfor %}"""

QWEN_CODER = """
{%- for tool_call in message.tool_calls or [] %}{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- for name, value in tool_call.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}"""

GLM = """
{%- for tool_call in message.tool_calls or [] %}{%- set tool_call = tool_call.function %}
{{- '\\n<tool_call>' + tool_call.name + '\\n' }}{%- for name, value in tool_call.arguments | items %}
{{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) }}
{{- '</arg_value>\\n' }}{%- endfor %}{{- '</tool_call>' }}{%- endfor %}"""

MISTRAL = """
{%- if message.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}
{%- if tool_call.id | length != 9 %}{{- raise_exception('ids have 9 characters') }}{%- endif %}
{{- (tool_call.function | tojson)[:-1] + ', "id": "' + tool_call.id + '"}' }}
{{- ']' if loop.last else ', ' }}{%- endfor %}{%- endif %}"""

MISTRAL_ARGS = """
{%- for tool_call in message.tool_calls or [] %}
{{- '[TOOL_CALLS]' + tool_call.function.name + '[ARGS]' + (tool_call.function.arguments | tojson) }}{%- endfor %}"""

KIMI = """
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for tool_call in message.tool_calls %}
{{- '<|tool_call_begin|>' + tool_call.id + '<|tool_call_argument_begin|>' }}
{{- (tool_call.function.arguments | tojson) + '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}"""

PYTHONIC = ""

_VALUE = """{%%- macro value_of(value) -%%}
{%%- if value is string -%%}{{- '%s' + value + '%s' -}}
{%%- elif value is boolean -%%}{{- 'true' if value else 'false' -}}
{%%- elif value is none -%%}null
{%%- elif value is mapping -%%}{{- '{' -}}{%%- for key, each in value | dictsort -%%}
{{- key + ':' + value_of(each) + ('' if loop.last else ',') -}}{%%- endfor -%%}{{- '}' -}}
{%%- elif value is sequence -%%}{{- '[' -}}{%%- for each in value -%%}
{{- value_of(each) + ('' if loop.last else ',') -}}{%%- endfor -%%}{{- ']' -}}
{%%- else -%%}{{- value -}}{%%- endif -%%}{%%- endmacro -%%}"""

_GEMMA = """
{%%- for tool_call in message.tool_calls or [] %%}{%%- set tool_call = tool_call.function -%%}
{{- '%s' + 'call:' + tool_call.name + '{' -}}{%%- for key, value in tool_call.arguments | dictsort -%%}
{{- key + ':' + value_of(value) + ('' if loop.last else ',') -}}{%%- endfor -%%}{{- '}' + '%s' -}}{%%- endfor %%}"""

GEMMA4 = (_VALUE % ('<|"|>', '<|"|>'), _GEMMA % ("<|tool_call>", "<tool_call|>"))
FUNCTION_GEMMA = (_VALUE % ("<escape>", "<escape>"), _GEMMA % ("<start_function_call>", "<end_function_call>"))

_PYTHON_VALUE = """{%- macro value_of(value) -%}
{%- if value is boolean -%}{{- 'True' if value else 'False' -}}{%- elif value is none -%}None
{%- else -%}{{- value | tojson -}}{%- endif -%}{%- endmacro -%}"""

_LIST = """
{%%- if message.tool_calls %%}{{- '%s[' }}{%%- for tool_call in message.tool_calls %%}
{{- tool_call.function.name + '(' -}}{%%- for key, value in tool_call.function.arguments.items() -%%}
{{- key + '=' + %s + ('' if loop.last else ', ') -}}{%%- endfor -%%}{{- ')' + ('' if loop.last else ', ') -}}
{%%- endfor %%}{{- ']%s' }}{%%- endif %%}"""

LFM = (_PYTHON_VALUE, _LIST % ("<|tool_call_start|>", "value_of(value)", "<|tool_call_end|>"))
LLAMA_LIST = (_PYTHON_VALUE, _LIST % ("", "value_of(value)", ""))
LLAMA_BARE = ("", _LIST % ("", "('%s' | format(value))", ""))
"""As vLLM's template for Llama 3.2: texts are without quotation marks."""

ODD = """
{%- for tool_call in message.tool_calls or [] %}
{{- '<tool_call>' + tool_call.function.name + '()</tool_call>' }}{%- endfor %}"""

LLAMA = """
{%- if message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at once') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}{%- endif %}"""

LISTED = """
{%- if message.tool_calls %}{{- '<|tool_call|>' }}
{{- message.tool_calls | map(attribute='function') | list | tojson }}{%- endif %}"""

ACTION = """
{%- if message.tool_calls %}{{- 'Action: ```json\n[' }}{%- for tool_call in message.tool_calls %}
{{- '\n    {"tool_name": "' + tool_call.function.name + '", "parameters": ' }}
{{- (tool_call.function.arguments | tojson) + '}' + (',' if not loop.last else '\n]```') }}{%- endfor %}{%- endif %}"""

FENCED = """
{%- if message.tool_calls %}{{- '<|calls|>' }}{%- for tool_call in message.tool_calls %}
{{- '<|call|>function<|sep|>' + tool_call.function.name + '\n```json\n' }}
{{- (tool_call.function.arguments | tojson) + '\n```<|/call|>' }}{%- endfor %}{{- '<|/calls|>' }}{%- endif %}"""

_CALL = ("<tool_call>", "</tool_call>")
_KIMI = ("section_begin", "section_end", "call_begin", "call_end", "call_argument_begin")

FAMILIES: dict[str, tuple[str | tuple[str, str], tuple[str, ...], str]] = {
    "hermes": (HERMES, _CALL, "{#- tool_call.name -#}"),
    "hermes, markers as text": (HERMES, (), "{#- tool_call.name -#}"),
    "qwen3_coder": (QWEN_CODER, _CALL, "{#- <tool_call>\\n<function= -#}"),
    "qwen3_coder, markers as text": (QWEN_CODER, (), "{#- <tool_call>\\n<function= -#}"),
    "glm": (GLM, (*_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), ""),
    "mistral": (MISTRAL, ("[TOOL_CALLS]",), ""),
    "mistral, ARGS": (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]"), ""),
    "kimi": (
        KIMI,
        tuple(f"<|tool_call{'s' if 'section' in name else ''}_{name.removeprefix('call_')}|>" for name in _KIMI),
        "",
    ),
    "pythonic": (LFM, ("<|tool_call_start|>", "<|tool_call_end|>"), ""),
    "gemma4": (GEMMA4, ("<|tool_call>", "<tool_call|>", '<|"|>'), ""),
    "function_gemma": (FUNCTION_GEMMA, ("<start_function_call>", "<end_function_call>", "<escape>"), ""),
    # Its template shows no calls, and its markers tell all.
    "pythonic, not shown": (PYTHONIC, ("<|tool_call_start|>", "<|tool_call_end|>"), ""),
    "llama, bare": (LLAMA_BARE, (), "{#- tools -#}"),
    "odd": (ODD, _CALL, "{#- tool_call.name -#}"),
}
"""Template, markers that are tokens, and what mlx-lm looks for in the template."""

UNKNOWN: dict[str, tuple[str | tuple[str, str], tuple[str, ...], str]] = {
    "llama": (LLAMA, (), "{#- tools -#}"),
    "llama, pythonic": (LLAMA_LIST, (), "{#- tools -#}"),
    "listed": (LISTED, ("<|tool_call|>",), "{#- tools -#}"),
    "action": (ACTION, (), "{#- tools -#}"),
    "fenced": (FENCED, ("<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>"), "{#- tools -#}"),
}
"""Those for which mlx-lm has no parser."""


def write_family(folder: Path, family: str, *, thinking: bool = False) -> Path:
    """A model folder with a family's template; with `thinking` its prompts open a block of reasoning."""
    template, markers, hint = (FAMILIES | UNKNOWN)[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["the quick brown fox"] * 4, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    special = family.startswith(("mistral", "kimi", "pythonic", "fenced", "gemma", "function"))
    macros, template = ("", template) if isinstance(template, str) else template
    if thinking:
        markers = (*markers, "<think>", "</think>")
    tokenizer.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in markers])
    whole = macros + _HEAD + template + _TAIL + (_THINK if thinking else _ASK) + hint
    return write_folder(folder, tokenizer, whole)
