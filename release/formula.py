"""Writes a Homebrew formula for a wheel of Satchel: `python -m release.formula WHEEL URL`.

The formula has each package of `requirements.lock` as a resource: the wheel for macOS on arm64, by its address and its
hash. Homebrew's own way is to build each one from its source, which MLX's and Ray's do not allow. uv finds the
addresses in the package index that it is configured for, so a formula is made for a release, and not kept here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.markers import Environment
from packaging.pylock import Package, PackageWheel, Pylock, PylockSelectError
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
PYTHON = (3, 13)
"""The Python of the formula."""

MACOS = {14: "sonoma", 15: "sequoia", 26: "tahoe"}
"""The versions of macOS for which packages have wheels, and what Homebrew calls them; the last stands for newer."""

FORMULA = """\
# Written by `make formula` for this version of Satchel.
class Satchel < Formula
  include Language::Python::Virtualenv

  desc "{description}"
  homepage "{homepage}"
  url "{url}", using: :nounzip
  version "{version}"
  sha256 "{sha256}"
  license "Apache-2.0"

  depends_on arch: :arm64
  depends_on macos: :{oldest}
  depends_on "python@{python}"

  # The libraries in some wheels have no room for the longer names that Homebrew would give them.
  preserve_rpath

{resources}
  def install
    resources.each {{ |wheel| wheel.stage(buildpath/"wheels") }}
    virtualenv_create(libexec, "python{python}", system_site_packages: false)
    system "python{python}", "-m", "pip", "--python=#{{libexec}}/bin/python", "install", "--no-deps", "--no-index",
           *Dir["*.whl", "wheels/*.whl"]
    bin.install_symlink libexec/"bin/satchel"
    cp libexec/"lib/python{python}/site-packages/satchel/configs/one-mac.yaml", "satchel.yaml"
    etc.install "satchel.yaml"
  end

  service do
    run [opt_bin/"satchel", "serve", "--config", etc/"satchel.yaml"]
    keep_alive successful_exit: false
    process_type :interactive
    log_path var/"log/satchel.log"
    error_log_path var/"log/satchel.log"
  end

  test do
    assert_equal "satchel #{{version}}", shell_output("#{{bin}}/satchel --version").strip
    assert_match "embedded:recall", shell_output("#{{bin}}/satchel configs one-mac")
  end
end
"""


def environment_of_a_mac() -> Environment:
    """Returns what markers in requirements are compared with."""
    python = ".".join(map(str, PYTHON))
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "arm64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Darwin",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "darwin",
    }


def tags_of_a_mac(macos: int) -> list[Tag]:
    """Returns the tags of the wheels that a Mac with this version of macOS can use, the best first."""
    platforms = list(mac_platforms((macos, 0), "arm64"))
    interpreter = f"cp{PYTHON[0]}{PYTHON[1]}"
    return [
        *cpython_tags(PYTHON, platforms=platforms),
        *compatible_tags(PYTHON, interpreter=interpreter, platforms=platforms),
    ]


def with_addresses(project: Path, uv: str) -> Pylock:
    """Returns the project's lock with the addresses of all wheels.

    Raises:
        SystemExit: uv cannot find them.
    """
    command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--no-header"]
    command += ["--format", "pylock.toml", "--constraint", "requirements.lock", "pyproject.toml"]
    found = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        raise SystemExit(f"uv cannot find the packages of requirements.lock: {found.stderr.strip()}")
    return Pylock.from_dict(tomllib.loads(found.stdout))


def wheels(lock: Pylock, macos: int) -> Iterator[tuple[Package, PackageWheel]]:
    """Yields each package with the best of its wheels for this version of macOS.

    Raises:
        SystemExit: a package has none.
    """
    try:
        for package, chosen in lock.select(environment=environment_of_a_mac(), tags=tags_of_a_mac(macos)):
            if not isinstance(chosen, PackageWheel):
                raise SystemExit(f"no wheel for macOS {macos}: there is only the source of '{package.name}'")
            yield package, chosen
    except PylockSelectError as error:
        raise SystemExit(f"no wheel for macOS {macos}: {error}") from None


def resource(name: str, chosen: dict[int, PackageWheel]) -> str:
    """Returns a package's resource.

    Args:
        chosen: its wheel for each version of macOS. An older one does for all, if there is no other.
    """
    lines = [f'  resource "{name}" do']
    if len({wheel.url for wheel in chosen.values()}) == 1:
        lines += _file(next(iter(chosen.values())), "    ")
    else:
        for macos, wheel in chosen.items():
            newer = " :or_newer" if macos == max(chosen) else ""
            lines += [f"    on_{MACOS[macos]}{newer} do", *_file(wheel, "      "), "    end"]
    return "\n".join([*lines, "  end", ""])


def _file(wheel: PackageWheel, indent: str) -> list[str]:
    return [f'{indent}url "{wheel.url}", using: :nounzip', f'{indent}sha256 "{wheel.hashes["sha256"]}"']


def formula(project: Path, wheel: Path, url: str, homepage: str, uv: str) -> str:
    """Returns the text of the formula.

    Args:
        project: the folder of `pyproject.toml` and `requirements.lock`.
        wheel: Satchel's own wheel.
        url: where that wheel can be downloaded.
        uv: the program.

    Raises:
        SystemExit: an address or a wheel for macOS is not found, or a wheel is not the one that is locked.
    """
    locked = set(re.findall(r"sha256:([0-9a-f]{64})", (project / "requirements.lock").read_text(encoding="utf-8")))
    lock, chosen = with_addresses(project, uv), dict[str, dict[int, PackageWheel]]()
    for macos in MACOS:
        for package, found in wheels(lock, macos):
            if found.hashes["sha256"] not in locked:
                raise SystemExit(f"{package.name}: requirements.lock does not have the hash of {found.url}")
            chosen.setdefault(package.name, {})[macos] = found
    description = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["description"]
    return FORMULA.format(
        description=description,
        homepage=homepage,
        url=url,
        version=parse_wheel_filename(wheel.name)[1],
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        oldest=MACOS[min(MACOS)],
        python=".".join(map(str, PYTHON)),
        resources="\n".join(resource(name, chosen[name]) for name in sorted(chosen)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release.formula", description="Writes a Homebrew formula.")
    parser.add_argument("wheel", type=Path, help="Satchel's wheel")
    parser.add_argument("url", help="where it can be downloaded")
    parser.add_argument("--homepage", help="the project's; else the folder of the URL")
    parser.add_argument("--project", type=Path, default=ROOT, help="the folder of the lock")
    parser.add_argument("--uv", default=os.environ.get("UV", "uv"), help="the program uv")
    given = parser.parse_args()
    homepage = given.homepage or given.url.rpartition("/")[0]
    print(formula(given.project, given.wheel, given.url, homepage, given.uv), end="")


if __name__ == "__main__":
    main()
