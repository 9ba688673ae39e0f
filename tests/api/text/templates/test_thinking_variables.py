"""A switch of thinking reaches a template under the name that the template knows."""

from __future__ import annotations

from typing import Any

import pytest

from satchel.api.text.templates.thinking_variables import with_thinking

QWEN = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}{{ message.thinking }}"
OTHERS = "{% generation %}{{ messages[0].thinking }}{% endgeneration %}"
MODES = "{% if thinking_mode == 'disabled' %}off{% endif %}{% if thinking_mode == 'enabled' %}on{% endif %}"
EFFORT = "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "given", "more"),
    [
        (QWEN, {"enable_thinking": False}, {}),
        (QWEN, {"thinking": False}, {"enable_thinking": False}),
        (DEEPSEEK, {"enable_thinking": True}, {"thinking": True}),
        (DEEPSEEK, {"enable_thinking": True, "thinking": False}, {}),
        (OTHERS, {"enable_thinking": True}, {}),
        (MODES, {"enable_thinking": False}, {"thinking_mode": "disabled"}),
        (MODES, {"thinking": True}, {"thinking_mode": "enabled"}),
        (EFFORT, {"enable_thinking": False, "reasoning_effort": "low"}, {"reasoning_effort": "none"}),
        (EFFORT, {"enable_thinking": True, "reasoning_effort": "high"}, {}),
        (QWEN, {"reasoning_effort": "low"}, {}),
        ("{% if %}", {"enable_thinking": False}, {}),
    ],
)
def test_the_switch_has_the_templates_name(template: str, given: dict[str, Any], more: dict[str, Any]):
    assert with_thinking(template, given) == {**given, **more}
