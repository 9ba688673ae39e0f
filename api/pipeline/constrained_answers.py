"""Constrained answers (a response format or tools): their grammars, written and compiled before a sequence is queued.

Replicas compile the same text again. It is compiled here so that the caller gets an error at once, with its place, if a
grammar does not compile.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from ...actors.model_files.text.grammar_compiler import GrammarCompiler, follows_schema
from ...cluster.errors import InvalidRequest, quoted
from ..requests.conversation import with_arguments
from ..requests.history import answer_message
from ..requests.requests import Chat, ChatRequest
from ..text.answers.grammars import AnswerForm, Thought, Writing, answer_grammar, form_grammar
from ..text.callers_text import CallersText
from ..text.model import TextModel
from ..text.script import Script, answer_tokens, token_grammar
from ..tools.answer_pieces import ToolCall
from ..tools.formats.call_format import ConstrainedCalls, ConstrainedTool
from ..tools.grammar_rules import schema_of_arguments
from ..tools.schema_parts import followable, parts

_BLAME_S = 0.5
"""Seconds for which parts of a schema are compiled to find the one that is wrong."""


def constrained_calls(request: ChatRequest) -> ConstrainedCalls | None:
    """Returns which tools the request's answers may call; None if its calls are not constrained.

    Raises:
        InvalidRequest: `tool_choice` names a tool that the request does not have.
    """
    tools = [
        ConstrainedTool(
            tool["function"]["name"],
            tool["function"].get("parameters") or {},
            request.tool_places[index] if request.tool_places else f"tools[{index}].function.parameters",
            bool(tool["function"].get("strict")),
        )
        for index, tool in enumerate(request.tools)
    ]
    use = request.tool_use
    names, forced = use.names, use.forced
    if forced and not tools:
        raise InvalidRequest("tool_choice: there are no tools to call", param="tool_choice")
    for name in names or ():
        if all(tool.name != name for tool in tools):
            raise InvalidRequest(f"tool_choice: {quoted(name)} is not among the tools", param="tool_choice")
    if not tools or not use.shown:
        return None
    allowed = [tool for tool in tools if names is None or tool.name in names]
    if forced or names is not None or request.form is not None or any(tool.strict for tool in tools):
        return ConstrainedCalls(allowed, forced, use.parallel, names is not None)
    return None


def scripted_grammar(script: Script, chat: Chat, calls: ConstrainedCalls | None) -> str:
    """Returns the grammar that forces a script's next answer in a conversation; "" if the script has no answer left and
    the request constrains the answer itself.

    Raises:
        InvalidRequest: the model's template cannot write it.
    """
    text, request = chat.text_model, chat.request
    said = with_arguments(chat.messages)
    reply = script.reply(said, chat.tools)
    forced = calls is not None and request.tool_use.forced
    if (reply.otherwise and request.form is not None) or (not reply.calls and forced):
        return ""
    made = [
        ToolCall(index, f"call_{index}", name, json.dumps(arguments))
        for index, (name, arguments) in enumerate(reply.calls)
    ]
    answer = with_arguments([answer_message(reply.text, "", made)])
    guard = CallersText(text.tokenizer, request.scope)
    shown, tools = guard.messages([*said, *answer]), guard.value(chat.tools)
    prompt = text.template.render(shown[: len(said)], tools, request.template_kwargs)
    whole = text.template.render(shown, tools, request.template_kwargs, generation_prompt=False)
    return token_grammar(answer_tokens(text.tokenizer, prompt, whole))


class ModelGrammars:
    """Writes and compiles grammars for one model's answers. Thread-safe; call it in worker threads.

    Args:
        bytes_max: how long a grammar may be, as UTF-8.
    """

    def __init__(self, text: TextModel, bytes_max: int) -> None:
        self._text = text
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._known: tuple[GrammarCompiler, Writing] | None = None

    def grammar(self, thought: Thought, form: AnswerForm | None, calls: ConstrainedCalls | None) -> str:
        """Returns the grammar of an answer, "" if it is not constrained. May take seconds.

        Raises:
            InvalidRequest: it does not compile, is too long, or is not supported for the model's answers; `param` is
                the place.
        """
        if form is None and calls is None:
            return ""
        compiler, writing = self._ready()
        unforced = calls is not None and not (calls.forced or calls.chosen)
        if unforced and form is None and not writing.calls.constrains:
            # Only `strict` asks for constrained calls: without it the model calls tools as well as it can.
            return ""
        form, calls = _followable(form, calls)
        written = answer_grammar(writing, thought, form, calls)
        if (size := len(written.encode("utf-8", "replace"))) > self._bytes_max:
            where = form.where if form is not None else "tools"
            message = f"{where}: the grammar has {size} bytes; at most {self._bytes_max} (endpoint.grammar_bytes_max)"
            raise InvalidRequest(message, param=where)
        try:
            compiler.matcher(written)
        except InvalidRequest as error:
            raise self._explained(compiler, form, calls, error) from None
        return written

    def _ready(self) -> tuple[GrammarCompiler, Writing]:
        with self._lock:
            if self._known is None:
                tokenizer = self._text.tokenizer
                compiler = GrammarCompiler(tokenizer.json(), tokenizer.end_tokens)
                writing = Writing(tokenizer, self._text.template, compiler.is_special, self._text.call_format)
                self._known = compiler, writing
            return self._known

    @staticmethod
    def _explained(
        compiler: GrammarCompiler, form: AnswerForm | None, calls: ConstrainedCalls | None, error: InvalidRequest
    ) -> InvalidRequest:
        """Returns the error with the form or tool that caused it, and the place in its schema."""
        forms = [] if form is None else [form]
        for tool in () if calls is None else calls.tools:
            forms.append(AnswerForm("json", schema_of_arguments(tool.parameters), tool.where, tool.strict))
        for each in forms:
            if (reason := _refusal(compiler, each)) is not None:
                if each.kind == "json":
                    each = _blamed(compiler, each, reason)
                return InvalidRequest(f"{each.where}: {reason}", param=each.where)
        where = form.where if form is not None else "tools"
        return InvalidRequest(f"{where}: {error.message}", param=where)


def _followable(
    form: AnswerForm | None, calls: ConstrainedCalls | None
) -> tuple[AnswerForm | None, ConstrainedCalls | None]:
    """Returns a form and calls without the parts of their schemas that are not supported. Strict schemas stay as they
    are."""
    if form is not None and form.kind == "json" and not form.strict:
        form = replace(form, value=followable(form.value, follows_schema))
    if calls is not None:
        tools = [
            tool if tool.strict else replace(tool, parameters=followable(tool.parameters, follows_schema))
            for tool in calls.tools
        ]
        calls = replace(calls, tools=tools)
    return form, calls


def _refusal(compiler: GrammarCompiler, form: AnswerForm) -> str | None:
    """Returns why a form alone does not compile; None if it does."""
    try:
        compiler.matcher(form_grammar(form))
    except InvalidRequest as error:
        reason = error.message.partition("failed to compile JSON schema: ")[2] or error.message
        return reason.partition("\n   1 |")[0].strip()
    return None


def _blamed(compiler: GrammarCompiler, form: AnswerForm, reason: str) -> AnswerForm:
    """Returns a form with the smallest part of the schema that still gives the same `reason`."""
    root, ends = form.value, time.monotonic() + _BLAME_S
    shared = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, Mapping) and key in root}
    while True:
        for step, part in parts(form.value):
            if time.monotonic() > ends:
                return form
            value = {**shared, **part} if isinstance(part, Mapping) else part
            if _refusal(compiler, replace(form, value=value)) == reason:
                form = replace(form, value=part, where=f"{form.where}.{step}")
                break
        else:
            return form
