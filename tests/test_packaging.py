"""What is installed is what is in the tree, and what is locked can be checked."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.worlds.wheels import FOLDERS, ROOT, build_wheel

PACKAGES = ("cluster", "actors", "api")
LOCKS = ("requirements.lock", "tests/requirements.lock", "docs/requirements.lock")


def files_of_the_tree() -> set[str]:
    found: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.name != ".DS_Store":
                found.add(f"satchel/{path.relative_to(ROOT).as_posix()}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files_of_the_tree()


def test_the_wheel_says_that_it_has_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert {f"satchel/{package}/py.typed" for package in PACKAGES} <= set(archive.namelist())


def test_the_wheel_works_without_the_tree(wheel: Path, tmp_path: Path) -> None:
    """The wheel's own files, ahead of the checkout's in the path, and far from it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.meta_path[:] = [f for f in sys.meta_path"
        " if 'editable' not in str(getattr(f, '__name__', f)).lower()]\n"
        "import satchel.api.cli.main as cli, satchel.actors.replica as replica\n"
        "import satchel.cluster.config.config as config\n"
        "assert cli.__file__.startswith(sys.argv[1]), cli.__file__\n"
        "assert config.default_config().models[0].source == 'embedded:recall'"
    )
    run = subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path)], check=False, timeout=60, cwd=tmp_path)
    assert run.returncode == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_the_bare_name_is_refused(package: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {package}"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert result.returncode == 1
    assert f"ImportError: import this package as satchel.{package}" in result.stderr


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_hashes_and_no_host(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    for entry in re.split(r"\n(?=\S)", text):
        if not entry.startswith("#"):
            assert re.match(r"[a-z0-9._-]+(\[[a-z0-9,-]+\])?==\S+", entry), entry.splitlines()[0]
            assert "--hash=sha256:" in entry, entry.splitlines()[0]


@pytest.mark.parametrize("lock", LOCKS[1:])
def test_the_locks_agree(lock: str) -> None:
    """A package of both has the same version in both, or versions where they depend on the Python."""
    runtime, tools = (
        set(re.findall(r"^([a-z0-9._-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE))
        for name in (LOCKS[0], lock)
    )
    shared = {name for name, _ in runtime}
    assert {pin for pin in tools if pin[0] in shared} <= runtime


def test_the_lock_pins_what_the_project_pins() -> None:
    pins = re.findall(r'"([a-z-]+)(?:\[\w+\])?==([\d.]+)', (ROOT / "pyproject.toml").read_text())
    text = (ROOT / "requirements.lock").read_text()
    assert {name for name, _ in pins} >= {"mlx", "mlx-lm", "mlx-vlm", "ray", "transformers", "uvicorn"}
    for name, version in pins:
        assert re.search(rf"^{name}==", text, re.MULTILINE), name
        assert f"\n{name}=={version} " in text, name
    assert "\nsetuptools==" in text, "the build backend, for an installation without build isolation"
    unwanted = ("torch", "datasets", "pandas", "pyarrow")
    assert not [name for name in unwanted if f"\n{name}==" in text + (ROOT / "tests/requirements.lock").read_text()]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_what_is_left_out_of_the_lock_is_left_out_of_what_uv_installs() -> None:
    """A tool's environment does not follow `pyproject.toml`, so the commands say both again."""
    left_out = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-dependencies"]
    dry = ["make", "--dry-run", "install", f"PYTHON={sys.executable}"]
    made = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    for commands in (made, (ROOT / "docs/install.md").read_text()):
        ((piped, options),) = re.findall(r"echo ([\w ]+) \| \S+ tool install([^|]*)", commands.replace("\\\n", ""))
        assert piped.split() == left_out
        assert "--constraints requirements.lock --excludes - " in options


def imported_names(path: Path) -> set[str]:
    """The modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]


def test_one_file_knows_ray_serve() -> None:
    """import-linter sees other people's packages as a whole, so this contract is held here."""
    users = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if any(name == "ray.serve" or name.startswith("ray.serve.") for name in imported_names(path))
    }
    # The other binds its port to loopback, and calls nothing.
    assert users <= {"api/serve.py", "cluster/patches.py"}


def test_the_product_knows_nothing_of_what_stands_around_it() -> None:
    others = {name.split(".")[0] for path in sources() for name in imported_names(path)}
    assert not others & {"benchmarks", "docs", "examples", "release", "tests", "training"}


def test_how_models_are_made_knows_nothing_of_what_measures_them() -> None:
    programs = list((ROOT / "training").rglob("*.py"))
    others = {name.split(".")[0] for path in programs for name in imported_names(path)}
    assert "satchel" in others and not others & {"benchmarks", "tests"}


def test_one_file_reads_the_environment() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if re.search(r"\bos\.(environ|getenv|putenv)\b", path.read_text(encoding="utf-8"))
    }
    assert readers == {"cluster/environment.py"}


def test_every_pure_file_has_tests_that_are_to_notice_its_faults():
    """`make test-mutants` knows the files of the contract, and no others; and a folder's first line says what it is."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each["name"].startswith("Pure files"))
    named = {module.removeprefix("satchel.").replace(".", "/") for module in contract["source_modules"]}
    shells = {line.split(" -> ")[0].removeprefix("satchel.").replace(".", "/") for line in contract["ignore_imports"]}
    folders = {name for name in named if (ROOT / name).is_dir()}
    said = {
        path.parent.relative_to(ROOT).as_posix()
        for package in ("cluster", "actors", "api")
        for path in (ROOT / package).rglob("__init__.py")
        if " Pure" in path.read_text()
    }
    assert said == folders
    within = {path.relative_to(ROOT).as_posix() for name in folders for path in (ROOT / name).glob("[!_]*.py")}
    pure = (within | {f"{name}.py" for name in named - folders}) - {f"{name}.py" for name in shells}
    tests = tomllib.loads((ROOT / "tests/mutants/tests.toml").read_text())
    assert pure == set(tests)
    missing = [name for names in tests.values() for name in names if not (ROOT / "tests" / f"{name}.py").exists()]
    assert not missing


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("macos", "machine", "says"),
    [("13.6", "arm64", "needs macOS 14 or later; this is 13.6"), ("15.1", "x86_64", "one for arm64")],
)
def test_make_says_what_a_mac_lacks_before_it_installs(tmp_path: Path, macos: str, machine: str, says: str):
    python = tmp_path / "python"
    said = f"platform.mac_ver = lambda *_: ('{macos}',); platform.machine = lambda: '{machine}'"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import platform, sys; {said}; exec(sys.argv[1])" "$2"\n')
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    made = subprocess.run(
        ["make", ".uv/bin/uv", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert made.returncode and says in made.stderr and not (tmp_path / ".uv").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_python_finds_satchel_where_macos_hides_the_environment(tmp_path: Path):
    """It skips hidden .pth files. macOS's `chflags` is a script here."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    places = ("requirements.lock", "pyproject.toml", ".venv/lib/python3.12/site-packages/x.pth", ".venv/bin/python")
    for place in (*places, ".venv/bin/satchel", "chflags", ".venv/.runtime"):
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {path.name} "$@"\n')
        path.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # The tests themselves are run by make, which else says which folder it enters.
    command = ["make", "--no-print-directory", "serve", "UV=/bin/sh"]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    shown, served = made.stdout.splitlines()
    assert shown == f"chflags nohidden {places[2]}" and served.startswith("satchel serve"), made.stderr
