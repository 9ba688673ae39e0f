"""A formula of packages from an index in a folder: what it has, what it refuses, and whether Ruby can read it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or shutil.which("uv", path=ROOT / ".uv" / "bin") or ""
URL = "https://host.example/releases/satchel-1.2-py3-none-any.whl"

pytestmark = pytest.mark.skipif(not UV, reason="needs uv")


def write_wheel(folder: Path, name: str, requires: tuple[str, ...] = ()) -> Path:
    """Writes a wheel that has nothing but its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    package, version, *_ = name.split("-")
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(folder / name, "w") as archive:
        info = f"{package}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n{needs}")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {name}\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder / name


class Release:
    """A project with a lock, its wheel, and the index that it is locked from."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, folder / "index"
        self.wheel = write_wheel(folder, "satchel-1.2-py3-none-any.whl")
        needs = ("metal==2.0", "onlinux==1.0; sys_platform == 'linux'", "training==1.0")
        write_wheel(self.index / "pure", "pure-1.5-py3-none-any.whl", needs)
        for system in ("macosx_14_0_arm64", "macosx_15_0_arm64", "macosx_26_0_arm64", "manylinux_2_28_x86_64"):
            write_wheel(self.index / "metal", f"metal-2.0-cp313-cp313-{system}.whl")
            write_wheel(self.index / "metal", f"metal-2.0-cp311-cp311-{system}.whl")
        write_wheel(self.index / "onlinux", "onlinux-1.0-py3-none-any.whl")
        write_wheel(self.index / "training", "training-1.0-py3-none-any.whl")
        (folder / "pyproject.toml").write_text(
            '[project]\nname = "satchel"\nversion = "1.2"\ndescription = "Serves"\nrequires-python = ">=3.11"\n'
            'dependencies = ["pure>=1"]\n[tool.uv]\nexclude-dependencies = ["training"]\n'
        )
        self.lock = folder / "requirements.lock"
        self.lock.write_text("")
        self._list()
        command = [UV, "pip", "compile", "-q", "--universal", "--python-version", "3.11", "--generate-hashes"]
        command += ["pyproject.toml", "-o", "requirements.lock"]
        # No other index than this one.
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
        self.environment |= {"UV": UV, "UV_DEFAULT_INDEX": self.index.as_uri(), "XDG_CONFIG_HOME": str(folder)}
        subprocess.run(command, cwd=folder, env=self.environment, check=True, timeout=60)

    def _list(self) -> None:
        for package in self.index.iterdir():
            links = [
                f'<a href="{path.name}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">{path.name}</a>'
                for path in sorted(package.glob("*.whl"))
            ]
            (package / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")

    def formula(self) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "release.formula", str(self.wheel), URL, "--project", str(self.folder)]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture
def release(tmp_path: Path) -> Release:
    return Release(tmp_path)


def test_a_formula_has_the_locked_wheels_for_macs(release: Release) -> None:
    made = release.formula()
    assert made.returncode == 0, made.stderr
    text = made.stdout
    assert f'url "{URL}", using: :nounzip\n  version "1.2"\n' in text
    assert f'sha256 "{hashlib.sha256(release.wheel.read_bytes()).hexdigest()}"\n  license' in text
    assert re.findall(r'^  resource "(\w+)" do', text, re.MULTILINE) == ["metal", "pure"]
    assert re.findall(r"on_\w+.*\n.*?/(metal-[^\"]+)\"", text) == [
        "metal-2.0-cp313-cp313-macosx_14_0_arm64.whl",
        "metal-2.0-cp313-cp313-macosx_15_0_arm64.whl",
        "metal-2.0-cp313-cp313-macosx_26_0_arm64.whl",
    ]
    assert re.findall(r"on_\w+.*", text) == ["on_sonoma do", "on_sequoia do", "on_tahoe :or_newer do"]
    shown = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in release.index.rglob("*.whl")}
    for path, digest in shown.items():
        used = path.parent.name == "pure" or re.search("cp313-macosx", path.name)
        assert (f'{path.name}", using: :nounzip\n' in text and digest in text) == bool(used), path
    assert 'run [opt_bin/"satchel", "serve"' in text and "preserve_rpath" in text


@pytest.mark.skipif(shutil.which("ruby") is None, reason="needs ruby")
def test_ruby_reads_a_formula(release: Release) -> None:
    text = release.formula().stdout
    assert text.startswith("# Written by") and text.endswith("end\n")
    read = subprocess.run(["ruby", "-c"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert (read.returncode, read.stdout) == (0, "Syntax OK\n"), read.stderr


def test_a_wheel_that_is_not_the_locked_one_is_refused(release: Release) -> None:
    digest = hashlib.sha256((release.index / "pure/pure-1.5-py3-none-any.whl").read_bytes()).hexdigest()
    release.lock.write_text(release.lock.read_text().replace(digest, "0" * 64))
    made = release.formula()
    assert made.returncode == 1 and not made.stdout
    assert re.search("pure: requirements.lock does not have the hash of .*pure-1.5", made.stderr), made.stderr


def test_a_package_without_a_wheel_for_macs_is_named(release: Release) -> None:
    for path in release.index.glob("metal/*macosx*"):
        path.unlink()
    release._list()
    made = release.formula()
    assert made.returncode == 1 and not made.stdout
    assert re.match("no wheel for macOS 14: .*'metal'", made.stderr), made.stderr
