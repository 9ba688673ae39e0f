"""While a prompt is launched, MLX's memory limit says how much may be needed besides what there is."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from satchel.actors.protocol.replica_messages import Sampling
from satchel.actors.replica.device import temporary_memory
from satchel.actors.replica.device.temporary_memory import TEMPORARY, TemporaryMemory
from satchel.actors.replica.execution.executor import BatchExecutor
from tests.worlds.replica.bench import load_tiny


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """On a GPU: what MLX's limit was set to, one after another, of which the first is the usual one."""
    set_to = [10**12]

    def set_limit(nbytes: int) -> int:
        set_to.append(nbytes)
        return set_to[-2]

    monkeypatch.setattr(temporary_memory, "on_cuda", lambda: True)
    monkeypatch.setattr(mx, "set_memory_limit", set_limit)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 7000)
    return set_to


def test_the_limit_is_set_for_a_while_and_comes_back_after_an_error(limits: list[int]):
    temporary = TemporaryMemory()
    with temporary.limited():
        pass
    assert limits == [10**12], "nothing was said"
    temporary.bytes_max = 500
    with pytest.raises(ValueError, match="broken"), temporary.limited():
        assert limits[-1] == 7500
        raise ValueError("broken")
    assert limits[-1] == 10**12


def test_prompts_are_launched_so_and_steps_are_not(limits: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TEMPORARY, "bytes_max", 100)
    executor = BatchExecutor(load_tiny(tmp_path))
    executor.open("one", [], None, 0)
    executor.prefill([("one", [1, 2, 3])])
    assert limits[1:] == [7100, 10**12]
    del limits[1:]
    executor.join("one", [1, 2, 3, 4], Sampling(temperature=0.0), 0)
    executor.step()
    assert limits == [10**12]
