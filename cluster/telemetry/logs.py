"""The logs of a process: every line of its Python loggers, in one file of the home.

A line has the time, the level, the logger, the process, the id of the request that it is about if there is one, and the
text. No line has a prompt or an answer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from logging.handlers import MemoryHandler
from typing import Any

from ..config.config import Logs
from ..home import Home
from .context import request_id, span
from .log_file import LogFile, remove_old

KEPT_S = 14 * 24 * 3600.0
"""Files of former processes are removed this long after their last line."""

FILES_MAX = 100
"""Of so many processes files are kept at most, but always of those that run."""

OWN = "satchel"
"""The name of Satchel's package, with which its loggers' names begin."""

_RAYS = ("ray", "ray.serve", "ray.data")
"""Loggers that do not pass their lines on."""


def begin_logs(process: str, logs: Logs, home: Home, *, terminal: bool = False) -> None:
    """Writes this process's logs from now on. May be called again, with another config.

    Args:
        process: which one this is on its node, such as `router` or `replica:m-0`.
        terminal: whether Satchel's own warnings are also shown on standard error, one sentence each.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, (LogFile, _Terminal))]:
        root.removeHandler(handler)
        handler.close()
    least = logging.getLevelNamesMapping()[logs.level.upper()]
    file = LogFile(home.logs, re.sub(r"[^A-Za-z0-9_.-]+", "-", process))
    file.setFormatter(JsonLine(process) if logs.format == "json" else TextLine(process))
    file.addFilter(_Least(least))
    root.addHandler(file)
    if terminal:
        root.addHandler(_Terminal())
    own = logging.getLogger(OWN)
    own.setLevel(least)
    adopt_ray_loggers()
    remove_old(home.logs, time.time() - KEPT_S, FILES_MAX)
    own.info("%s begins as process %d", process, os.getpid())


def adopt_ray_loggers() -> None:
    """Makes Ray's loggers write where all others do, and not to standard error. Call it once Ray has been imported,
    which gives them handlers."""
    for name in _RAYS:
        logger = logging.getLogger(name)
        # Handlers of Ray Serve that write files stay.
        for handler in [each for each in logger.handlers if not isinstance(each, (MemoryHandler, logging.FileHandler))]:
            logger.removeHandler(handler)
        logger.propagate = True


class _Least(logging.Filter):
    """Lets Satchel's lines of a level pass, and libraries' warnings."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self._least = least

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= (self._least if is_own(record) else max(self._least, logging.WARNING))


def is_own(record: logging.LogRecord) -> bool:
    """Returns whether Satchel's own code has written a line."""
    return record.name == OWN or record.name.startswith(f"{OWN}.")


class _Terminal(logging.Handler):
    """Shows Satchel's own warnings to the person who started this process."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING or not is_own(record):
            return
        try:
            print(record.getMessage(), file=sys.stderr, flush=True)
        except Exception:
            # The terminal may be gone; the file has the line.
            return


def _utc(record: logging.LogRecord) -> str:
    """Returns a line's time as `2026-01-31T12:00:00.123Z`."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"


class TextLine(logging.Formatter):
    """Lines for people. Further lines of a text, such as a traceback, are indented."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        request = request_id()
        about = f" [{request}]" if request else ""
        head = f"{_utc(record)} {record.levelname:<7} {self._process} {record.name}{about}: "
        return head + "\n    ".join([record.getMessage(), *_traceback(self, record)]).rstrip()


class JsonLine(logging.Formatter):
    """Lines for programs: JSON objects with `time`, `level`, `logger`, `process`, `pid` and `message`; `request_id`,
    `trace_id` and `traceback` if there are any."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "pid": os.getpid(),
            "message": record.getMessage(),
        }
        if request := request_id():
            line["request_id"] = request
        if parent := span().parent:
            # `VERSION-TRACE-SPAN-FLAGS`.
            line["trace_id"] = parent.split("-")[1]
        if traceback := _traceback(self, record):
            line["traceback"] = "\n".join(traceback)
        return json.dumps(line, ensure_ascii=False)


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    """Returns the lines of a record's traceback and stack."""
    parts = [formatter.formatException(record.exc_info)] if record.exc_info and record.exc_info[0] else []
    parts += [formatter.formatStack(record.stack_info)] if record.stack_info else []
    return "\n".join(parts).splitlines()
