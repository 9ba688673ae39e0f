"""A change to a model stays only if the model then computes the same."""

from __future__ import annotations

import mlx.core as mx
import pytest

from satchel.actors.patches import Change
from satchel.actors.replica.proving.agreement import Verdict, try_change, unless_equal

REASON = "it computes something else"


class Model:
    """A model that computes one number, and its change."""

    def __init__(self, changed: float | Exception) -> None:
        self.number: float | BaseException = 1.0
        self.made = 0
        self.change = Change(lambda: self._be(changed), lambda: self._be(1.0))

    def _be(self, number: float | BaseException) -> None:
        self.number, self.made = number, self.made + 1

    def __call__(self) -> list[mx.array]:
        if isinstance(self.number, BaseException):
            raise self.number
        return [mx.array([self.number])]

    def tried(self) -> Verdict:
        return try_change(self, self, unless_equal(REASON), self.change)


def test_what_agrees_stays():
    model = Model(1.0 + 1e-6)
    assert model.tried().holds and model.number != 1.0 and model.made == 1


def test_what_differs_is_undone():
    model = Model(2.0)
    assert model.tried() == Verdict(REASON) and model.number == 1.0 and model.made == 2


def test_what_is_no_number_is_undone():
    model = Model(float("nan"))
    assert model.tried().reason == REASON and model.number == 1.0


def test_what_raises_is_undone_and_told():
    error = ValueError("no room")
    model = Model(error)
    verdict = model.tried()
    assert verdict == Verdict(error=error) and not verdict.holds and model.number == 1.0


def test_what_no_model_raises_is_undone_and_goes_on():
    model = Model(PermissionError("another one's"))
    with pytest.raises(PermissionError):
        model.tried()
    assert model.number == 1.0 and model.made == 2


def test_nothing_is_changed_if_the_model_does_not_run():
    model = Model(1.0)
    model.number = error = RuntimeError("it does not run")
    assert model.tried() == Verdict(error=error) and model.made == 0


def test_a_tolerance_may_be_given():
    model = Model(1.01)
    assert not model.tried().holds
    assert try_change(model, model, unless_equal(REASON, 0.1), model.change).holds


def test_a_change_for_now_is_undone_whatever_happens():
    model = Model(2.0)
    with pytest.raises(KeyError), model.change.for_now():
        assert model.number == 2.0
        raise KeyError
    assert model.number == 1.0
