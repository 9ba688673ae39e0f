"""A tokenizer that does not load is a clear error, whatever its config's classes raise."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from satchel.actors.model_files.text.grammar_compiler import load_compiler
from satchel.cluster.errors import ModelLoadError


@pytest.mark.parametrize("error", [OSError, RuntimeError, ZeroDivisionError, AssertionError, RecursionError])
def test_a_tokenizer_that_does_not_load_is_told(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object, **named: object) -> None:
        raise error("what a field must be")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fails)
    with pytest.raises(ModelLoadError, match="the tokenizer of 'm' does not load: what a field must be"):
        load_compiler(tmp_path, "m", [1], 10, trusted=False)
