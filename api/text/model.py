"""The text side of one served model: its tokenizer, its chat template, and how it writes tool calls.

Only `load_text_model` does I/O. Rendering and encoding may take milliseconds to seconds and belong in a worker thread.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...actors.model_files.foreign_code import own_code_only
from ...actors.model_files.media.processors import PictureProcessor, in_words, sees
from ...actors.model_files.source import first_sentence
from ...actors.model_files.text.end_tokens import read_end_tokens
from ...actors.model_files.text.nulls import without_nulls
from ...actors.protocol.media_ids import is_media_token
from ...actors.protocol.replica_messages import ThinkingBudget
from ...cluster.errors import ModelLoadError
from ..tools.formats import harmony
from ..tools.formats.call_format import CallFormat, CallMarks
from ..tools.model_calls import ModelCalls
from ..tools.shown_calls import unshown_format
from ..tools.template_tools import tools_of
from .control_tokens import Markers
from .recent import RecentTexts
from .script import Script
from .spelling import Spelling
from .templates.bare_template import BareTemplate
from .templates.template import Template
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_LINE_ENDS = ("\n", "\n\n", ".\n", ".\n\n", ":\n", "?\n", "!\n", ")\n", "。\n")
"""Ends of lines that are often one token."""


class TextModel:
    """The text side of one served model. Thread-safe.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper`.
        sampling: the sampling defaults of the model's generation config, by field.
        pictures: the model's image processor, None if it does not support images.
        script: a script that replaces the model's own answers, None for none.

    Attributes:
        tokenizer: encodes and decodes, and knows the control tokens.
        template: renders conversations.
        calls: how the model writes tool calls.
    """

    def __init__(
        self,
        wrapper: Any,
        *,
        name: str = "",
        sampling: Mapping[str, float] | None = None,
        pictures: PictureProcessor | None = None,
        script: Script | None = None,
    ) -> None:
        self.name = name
        self.script = script
        self.sampling = dict(sampling or {})
        self.pictures = pictures
        bare = BareTemplate(wrapper, name)
        if (unshown := unshown_format(bare, CallMarks.of(wrapper))) is not None:
            bare = BareTemplate(wrapper, name, unshown)
        self.calls = ModelCalls(wrapper, bare)
        shown = () if pictures is None else pictures.placeholders
        marks = self.calls.marks
        markers = Markers(bare.think_start, bare.think_end, marks.start, marks.end, self.calls.shown, pictures=shown)
        self.tokenizer = Tokenizer(wrapper, name, markers, bare.sources, in_harmony=bare.is_harmony)
        self.template = Template(bare, tools_of(bare, self.calls.from_template))

    @cached_property
    def spelling(self) -> Spelling:
        """The bytes of the tokens."""
        return Spelling(self.tokenizer)

    @cached_property
    def recent(self) -> RecentTexts:
        """Encodes prompts, and caches the recent ones."""
        return RecentTexts(self.spelling)

    @cached_property
    def call_format(self) -> CallFormat:
        """The format in which the model writes calls. Takes milliseconds the first time."""
        return self.calls.read(self.tokenizer, self.template.render)

    @cached_property
    def _breaks(self) -> list[int]:
        encoded = map(self.tokenizer.encode, _LINE_ENDS)
        return sorted({ids[0] for ids in encoded if len(ids) == 1})

    def thinking_budget(self, tokens: int, *, inside: bool, calls: bool) -> ThinkingBudget:
        """Returns how reasoning is limited to this many tokens.

        Args:
            inside: whether the prompt has opened a block.
            calls: whether tool calls may follow.
        """
        if not self.template.is_harmony:
            start, end = map(self.tokenizer.encode, (self.template.think_start, self.template.think_end))
            return ThinkingBudget(tokens, start, end, end, self._breaks, inside)
        # A call is on the channel `commentary`, where text may come first.
        following = f"{harmony.CHANNEL}commentary" if calls else harmony.FINAL
        parts = harmony.THOUGHT, harmony.END, harmony.NEXT + following
        start, end, closing = map(self.tokenizer.encode, parts)
        return ThinkingBudget(tokens, start, end, closing, self._breaks, inside, again=True)

    def plain(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns `tokens` with the model's own tokens in place of media token ids (see `protocol.media_ids`)."""
        if self.pictures is None or not any(map(is_media_token, tokens)):
            return tokens
        return array("I", [self.pictures.token_of(token) if is_media_token(token) else token for token in tokens])


def import_libraries() -> None:
    """Imports what `load_text_model` uses, ahead of time."""
    from mlx_lm import tokenizer_utils  # noqa: F401


def load_text_model(folder: str | Path, *, name: str = "", trusted: bool = False) -> TextModel:
    """Loads the text side of the model in `folder`, whose own code runs only if it is `trusted`. Takes up to seconds.

    Raises:
        ModelLoadError: the tokenizer is absent or does not load.
    """
    path = Path(folder)
    name = name or path.name
    with own_code_only(name, path, trusted=trusted), without_nulls(path) as read:
        try:
            wrapper = _wrapper(read, {"trust_remote_code": trusted} | _template_elsewhere(path))
        except ModelLoadError:
            # The tokenizer needs code that is not trusted.
            raise
        except (Exception, SystemExit) as error:
            # Libraries may raise anything, and some end the process.
            raise ModelLoadError(f"the tokenizer of {name!r} does not load: {first_sentence(error)}") from error
    # transformers makes an empty tokenizer if there is only a tokenizer_config.json.
    if len(wrapper.get_vocab().keys() - {entry.content for entry in wrapper.added_tokens_decoder.values()}) < 2:
        raise ModelLoadError(
            f"the tokenizer of {name!r} has no vocabulary: its folder lacks tokenizer.json or the like"
        )
    pictures = _pictures(path, trusted=trusted)
    return TextModel(wrapper, name=name, sampling=_own_sampling(path), pictures=pictures, script=Script.read(path))


def _wrapper(path: Path, options: dict[str, Any]) -> Any:
    # Imported here because mlx_lm brings MLX with it, which only processes that serve text need.
    from huggingface_hub.errors import StrictDataclassError
    from mlx_lm import tokenizer_utils
    from transformers import PreTrainedConfig

    ends = sorted(read_end_tokens(path)) or None
    try:
        return tokenizer_utils.load(path, options, eos_token_ids=ends)
    except StrictDataclassError as error:
        # The model's config does not suit transformers' own code for the model. That code does not compute here, and a
        # tokenizer has its own settings.
        logger.info("the config of %s is not what transformers wants: %s", path.name, first_sentence(error))
        options = options | {"config": PreTrainedConfig.from_pretrained(path)}
        return tokenizer_utils.load(path, options, eos_token_ids=ends)


def _template_elsewhere(path: Path) -> dict[str, str]:
    """Returns the chat template in the file of older processors, if the tokenizer's own files have none."""
    try:
        own = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
        if own or (path / "chat_template.jinja").is_file():
            return {}
        template = json.loads((path / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {"chat_template": template} if isinstance(template, str) else {}


def _pictures(path: Path, *, trusted: bool) -> PictureProcessor | None:
    if not sees(path):
        return None
    try:
        return PictureProcessor.load(path, trusted=trusted)
    except ModelLoadError:
        raise
    except (Exception, SystemExit) as error:
        # The replica then serves the model for text only, and reports that.
        logger.warning("%s is served without pictures here: %s", path.name, in_words(error, path))
        return None


def _own_sampling(path: Path) -> dict[str, float]:
    """Returns the sampling defaults in generation_config.json; `do_sample: false` is greedy. Omits values out of
    range."""
    try:
        config = json.loads((path / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    limits = {
        "temperature": (0.0, 10.0),
        "top_p": (0.0, 1.0),
        "top_k": (0, 2**31 - 1),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-9, 10.0),
    }
    own = {name: config[name] for name in limits if type(config.get(name)) in (int, float)}
    own = {name: value for name, value in own.items() if limits[name][0] <= value <= limits[name][1]}
    if config.get("do_sample") is False:
        # Greedy decoding ignores the filters, but not the penalty.
        own = {"temperature": 0.0} | {name: own[name] for name in ("repetition_penalty",) if name in own}
    return own
