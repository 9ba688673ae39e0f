"""What a Ray cluster must not run besides Satchel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from satchel.api import serve
from satchel.cluster.config import Config
from satchel.cluster.errors import ClusterError


def test_nothing_is_started_beside_another_application_of_ray_serve(monkeypatch: pytest.MonkeyPatch, config: Config):
    began: list[Config] = []
    running = {serve.APPLICATION: None, "shop": None}
    monkeypatch.setattr(serve.serve, "status", lambda: SimpleNamespace(applications=running))
    monkeypatch.setattr(serve, "start_actors", began.append)
    with pytest.raises(ClusterError, match=r"Ray Serve runs shop in this Ray cluster.*Nothing was changed"):
        serve.deploy(config, report=lambda what, fraction: None)
    assert began == []
