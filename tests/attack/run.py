"""Attacks a server of its own, on loopback, while honest clients stream beside: nothing of theirs changes or stops.

    python -m tests.attack.run [--minutes 20] [--bodies 20000] [--only raw,large] [--seed 1]

Exits with 1 where a status from 500 on came that no limit names, a stream changed, was cut off or stood still for more
than a second (and longer than in peace), a process kept memory, or the server was gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import kept, machine
from benchmarks.programs import RESULTS, ROOT
from satchel.cluster.home import Home
from satchel.cluster.keys import create_key

from ..soak import server as soak_server
from .attacks import ATTACKS
from .http import AttackOutcome, healthy, sign
from .report import AttackSpan, Peace, entry, markdown, passed, peace, streams_in
from .scene import ADMIN, NAMES, Attack, AttackScene
from .streams import Streams

STREAMS, TOKENS = 16, 400
DISK_BYTES = 768 * 2**20
SETTLE_S = 20.0
PEACE_S = 600.0
"""In which every stream must have come to its end twice."""
MODELS = [
    {"name": "satchel/recall", "source": "embedded:recall", "replicas": 1, "numerics": "reproducible"},
    {"name": "satchel/shapes", "source": "embedded:shapes", "replicas": 1},
]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [attack.name for attack in ATTACKS]

    def positive(text: str) -> float:
        if not 0 < (found := float(text)) < float("inf"):
            raise argparse.ArgumentTypeError("numbers are positive")
        return found

    def chosen(text: str) -> list[str]:
        found = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in found if name not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(names)}")
        return found

    add = parser.add_argument
    add("--minutes", type=positive, default=20.0, help="of the attacks that last a time, together")
    add(
        "--bodies",
        type=lambda text: int(positive(text)),
        default=20_000,
        help="drawn bodies; of the others a twentieth",
    )
    add("--only", type=chosen, default=[], help=f"of {', '.join(names)}")
    add("--seed", type=int, default=1)
    add("--work", type=Path, help="where files are written (else a temporary folder)")
    add("--logs", type=Path, default=ROOT / "build" / "attack", help="where the server's log stays")
    add("--out", type=Path, default=RESULTS)
    add("--machine", help="the machine's name in the results' file names")
    return parser.parse_args(arguments)


def main() -> None:
    options = read_options()
    # So that what was started and mounted is ended in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    attacks = [attack for attack in ATTACKS if not options.only or attack.name in options.only]
    settings = {
        "bodies": options.bodies,
        "seconds an attack": round(60 * options.minutes / len(ATTACKS)),
        "streams": STREAMS,
        "tokens of a stream": TOKENS,
        "seed": options.seed,
    }
    facts = machine.facts("cpu")
    result: dict[str, Any] = {"machine": facts, "versions": machine.versions(sys.executable), "parts": {}}
    when, load = kept.now(), os.getloadavg()[0]
    part: dict[str, Any] = {"when": f"{when}, load of the machine before it {load:.2f}", "settings": settings}
    result["parts"]["attacks"] = part
    path = options.out / f"attack-{options.machine or machine.name_of(facts)}"

    def save() -> None:
        kept.save(path, result, markdown)

    with tempfile.TemporaryDirectory(prefix="satchel-attack-", dir=options.work) as folder:
        log = Path(folder) / "server.log"
        try:
            attack_all(Path(folder), log, attacks, settings, part, save)
        finally:
            options.logs.mkdir(parents=True, exist_ok=True)
            if log.exists():
                (options.logs / log.name).write_bytes(log.read_bytes())
    print(markdown(result))
    raise SystemExit(0 if passed(part) else 1)


def attack_all(
    folder: Path, log: Path, attacks: Sequence[Attack], settings: dict[str, Any], part: dict[str, Any], save: Any
) -> None:
    """All attacks on one server; `part` has what is known, and `save` is called after each."""
    with soak_server.disk_of(folder / "disk", DISK_BYTES) as disk:
        server = soak_server.SoakServer(disk.folder / "home", {"models": MODELS}, log, "reproducible")
        say("starting the server")
        streams = None
        try:
            keys = {name: create_key(Home(server.home), name, admin=name == ADMIN)[1] for name in NAMES}
            sign(keys[ADMIN])
            server.start()
            scene = AttackScene(
                server, disk, settings["bodies"], settings["seconds an attack"], settings["seed"], say, keys
            )
            streams = Streams(server.url, STREAMS, TOKENS, keys[NAMES[0]])
            calm = wait_for_peace(streams)
            say(f"in peace the longest gap is {calm.gap_s:.2f} s")
            part |= {"gap in peace, s": calm.gap_s, "attacks": [], "doctor": []}
            for attack in attacks:
                part["attacks"].append(attack_once(attack, scene, streams, calm))
                save()
            part["doctor"] = doctor(server)
            save()
        finally:
            if streams is not None:
                streams.stop()
            server.stop()


def wait_for_peace(streams: Streams) -> Peace:
    until = time.monotonic() + PEACE_S
    while time.monotonic() < until:
        said = list(streams.said)
        counts = [sum(each.stream == stream for each in said) for stream in range(STREAMS)]
        if min(counts) >= 2:
            return peace(said)
        time.sleep(1.0)
    raise RuntimeError(f"the streams did not come to their end within {PEACE_S:.0f} s")


def attack_once(attack: Attack, scene: AttackScene, streams: Streams, calm: Peace) -> dict[str, Any]:
    say(attack.name)
    before, began, clock = scene.memory(), time.time(), time.monotonic()
    try:
        outcome = attack.run(scene)
    except Exception as error:
        # What the other attacks find is worth having.
        outcome = AttackOutcome(unexpected=[f"the attack failed: {type(error).__name__}: {error}"])
    seconds = time.monotonic() - clock
    alive = bool(outcome.skipped) or healthy(scene.port)
    if not outcome.skipped:
        time.sleep(SETTLE_S)
    span = AttackSpan(began, time.time())
    seen = streams_in(list(streams.said), list(streams.waiting), span, calm)
    told = (attack.does, attack.expected)
    row = entry(
        attack.name,
        told,
        outcome,
        seen,
        (before, scene.memory()),
        seconds,
        judged=attack.judged,
        calm=calm,
        alive=alive,
    )
    say(f"{attack.name}: {'; '.join(row['broken']) or outcome.skipped or 'nothing broken'}")
    return row


def doctor(server: Any) -> list[str]:
    """What `satchel doctor` says of the home, without the paths of this machine."""
    command = [*soak_server.COMMAND, "doctor", "--home", str(server.home)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    text = found.stdout.replace(str(server.home), "HOME").replace(sys.prefix, "VENV")
    return [line.rstrip() for line in text.splitlines()]


if __name__ == "__main__":
    main()
