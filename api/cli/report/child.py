"""The process that measures a model for a report: `python -m satchel.api.cli.report.child SOURCE`.

It writes a line of JSON for each step that begins and each fact that is found, so a crash leaves what was found before.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from ....cluster.errors import SatchelError


def main() -> int:
    # Libraries may print; their output is not to mix with the lines.
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)

    def write(**line: Any) -> None:
        print(json.dumps(line, default=str), file=lines, flush=True)

    try:
        from ....actors.replica.selftest.device_report import tell_all

        tell_all(sys.argv[1], lambda name, value: write(fact=name, value=value), lambda step: write(step=step))
    except SatchelError as error:
        write(fact="failed", value=error.message)
    write(step="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
