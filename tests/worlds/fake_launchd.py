"""What launchd does with an agent's property list: `fake_launchd.py FOLDER bootstrap DOMAIN PLIST | bootout TARGET`.

A job gets launchd's own environment and not the shell's, its limits, its folder, and a log. `FOLDER/launchd` has a file
for each job that is loaded.
"""

from __future__ import annotations

import os
import plistlib
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

STANDARD = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "SHELL": "/bin/zsh", "TMPDIR": "/tmp/"}


def bootstrap(jobs: Path, domain: str, path: Path) -> str:
    job = plistlib.loads(path.read_bytes())
    loaded = jobs / job["Label"]
    if loaded.exists():
        return "Bootstrap failed: 5: Input/output error"
    if path.stat().st_mode & 0o022:
        return "Bootstrap failed: 122: Path had bad ownership/permissions"
    soft = job["SoftResourceLimits"]["NumberOfFiles"]
    log = os.open(job["StandardOutPath"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    process = subprocess.Popen(
        job["ProgramArguments"],
        cwd=job["WorkingDirectory"],
        env={**STANDARD, "HOME": os.environ["HOME"], **job.get("EnvironmentVariables", {})},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ),
    )
    loaded.write_text(f"{domain} {process.pid} {job['ExitTimeOut']}")
    return ""


def bootout(jobs: Path, target: str) -> str:
    domain, _, label = target.rpartition("/")
    loaded = jobs / label
    if not loaded.exists() or loaded.read_text().split()[0] != domain:
        return "Boot-out failed: 3: No such process"
    pid, wait_s = map(int, loaded.read_text().split()[1:])
    loaded.unlink()
    ends = time.monotonic() + wait_s
    for ending in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, ending)
            while time.monotonic() < ends:
                os.kill(pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return ""
    return ""


def main() -> int:
    folder, verb, *rest = sys.argv[1:]
    jobs = Path(folder) / "launchd"
    jobs.mkdir(exist_ok=True)
    failed = bootstrap(jobs, rest[0], Path(rest[1])) if verb == "bootstrap" else bootout(jobs, rest[0])
    print(failed, end="", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
