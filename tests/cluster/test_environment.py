"""What processes find in their environment."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from satchel.cluster import environment
from satchel.cluster.errors import ClusterError
from satchel.cluster.home import Home

NAMES = {"MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_MAX_OPS_PER_BUFFER"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def child(tmp_path: Path) -> dict[str, str]:
    return environment.child_environment(Home(tmp_path))


def test_mlx_is_told_how_to_use_cuda_unless_somebody_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert child(tmp_path).keys() >= NAMES and child(tmp_path)["MLX_MAX_OPS_PER_BUFFER"] == "100"
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "50")
    assert child(tmp_path)["MLX_MAX_OPS_PER_BUFFER"] == "50"


def test_several_machines_speak_tls_and_one_does_not_whatever_is_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    monkeypatch.setenv("RAY_TLS_SERVER_CERT", "/elsewhere")
    assert not [name for name in child(tmp_path) if "TLS" in name]
    home = Home(tmp_path)
    found = environment.child_environment(home, one_machine=False)
    assert found["RAY_USE_TLS"] == "1" and found["RAY_TLS_SERVER_CERT"] == str(home.certificate_file)
    assert found["RAY_TLS_SERVER_KEY"] == str(home.key_file)
    assert found["RAY_TLS_CA_CERT"] == str(home.authority_file)


def test_metal_keeps_its_own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not child(tmp_path).keys() & NAMES


def test_variables_are_set_for_a_while_and_then_as_before(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SATCHEL_TEST_ONE", "before")
    monkeypatch.delenv("SATCHEL_TEST_TWO", raising=False)
    with pytest.raises(OSError), environment.set_during(SATCHEL_TEST_ONE="1", SATCHEL_TEST_TWO="2"):
        assert (os.environ["SATCHEL_TEST_ONE"], os.environ["SATCHEL_TEST_TWO"]) == ("1", "2")
        raise OSError
    assert os.environ["SATCHEL_TEST_ONE"] == "before" and "SATCHEL_TEST_TWO" not in os.environ


def test_openblas_is_an_option(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SATCHEL_OPENBLAS", raising=False)
    assert not environment.wants_openblas()
    monkeypatch.setenv("SATCHEL_OPENBLAS", "1")
    assert environment.wants_openblas()


def test_what_lets_a_process_outlive_a_cluster_is_not_inherited_and_what_somebody_set_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ours = environment._OUTLIVING
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    assert not child(tmp_path).keys() & ours.keys()
    for name in ours:
        monkeypatch.setenv(name, "7")
    assert {name: child(tmp_path)[name] for name in ours} == dict.fromkeys(ours, "7")


def test_a_user_without_a_home_folder_is_told_what_to_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As in a container that runs under a user id of its own: HOME is not set, and no user has that id."""

    def unknown(_: object) -> None:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("SATCHEL_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for given in (None, "~/elsewhere"):
        if given is not None:
            monkeypatch.setenv("SATCHEL_HOME", given)
        with pytest.raises(ClusterError, match=f"{os.getuid()} has no home folder.*SATCHEL_HOME or --home"):
            environment.default_home()
    monkeypatch.setenv("SATCHEL_HOME", str(tmp_path))
    assert environment.default_home().root == tmp_path


def test_a_home_is_the_same_from_every_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("SATCHEL_HOME", raising=False)
    monkeypatch.setenv("HOME", "relative")
    monkeypatch.chdir(tmp_path)
    assert environment.default_home().root == tmp_path / "relative" / ".satchel"
    monkeypatch.setenv("SATCHEL_HOME", "~nobody-of-this-name/x")
    with pytest.raises(ClusterError, match="names the home of a user who does not exist"):
        environment.default_home()
