"""`satchel pull`: downloads a model from the Hub into its cache on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....actors.model_files.source import DownloadPlan, plan_download, resolve
from ....cluster.errors import ModelLoadError, SatchelError
from ..options import JsonOption
from ..printing import line_printer, print_json
from ..tables import size

if TYPE_CHECKING:
    from ....actors.replica.estimate import ModelEstimate


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hub id (owner/name or owner/name@revision).")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be downloaded, and end.")] = False,
    json: JsonOption = False,
) -> None:
    """Download a model from the Hub. If it is interrupted, the same command continues the download."""
    from huggingface_hub.utils import logging

    # Its warnings about every try again.
    logging.set_verbosity_error()
    say = line_printer(as_json=json)
    plan = plan_download(model)
    say(_sizes(model, plan))
    memory = _memory(model, plan)
    say(memory["said"])
    folder = None
    if not dry_run:
        folder = _download(model, plan, quiet=json)
        say(f"{model} is in {folder}; `satchel run {model}` talks to it" if plan.missing else f"It is in {folder}")
    if json:
        sizes = {"bytes": plan.total_bytes, "missing_bytes": plan.missing_bytes, "free_bytes": plan.free_bytes}
        found = {"source": model, "commit": plan.commit, "files": dict(plan.files), **sizes}
        memory.pop("said")
        print_json({**found, **memory, "folder": folder})


def _sizes(model: str, plan: DownloadPlan) -> str:
    files = f"{len(plan.files)} files, {size(plan.total_bytes)}"
    if not plan.missing:
        return f"{model}: {files}, and all of them are here"
    begun = "" if len(plan.missing) == len(plan.files) else f", {size(plan.missing_bytes)} of them missing"
    return f"{model}: {files}{begun}; {size(plan.free_bytes)} are free at {plan.place}"


def _memory(model: str, plan: DownloadPlan) -> dict[str, Any]:
    """Returns whether the model fits into this machine's memory, from the headers of its files."""
    from .fit import estimated, here

    try:
        found: ModelEstimate = estimated(model)
        fit = found.in_memory(here())
    except ModelLoadError as error:
        return {"fits": None, "why_not": error.message, "said": f"It cannot be served: {error.message}"}
    needs = {"fits": fit.context_tokens > 0, "weights_bytes": found.weights_bytes, "context_tokens": fit.context_tokens}
    if fit.context_tokens:
        said = f"It fits into this machine's memory, with contexts of up to {fit.context_tokens:,} tokens"
    else:
        said = f"It does not fit into this machine's memory: its weights take {size(found.weights_bytes)}"
    return {**needs, "said": f"{said} (`satchel fit {model}` says more)"}


def _download(model: str, plan: DownloadPlan, *, quiet: bool) -> str:
    """
    Raises:
        SatchelError: it failed or was interrupted; what came is kept.
    """
    from ..progress import ProgressDisplay

    progress = ProgressDisplay(sys.stderr) if quiet else ProgressDisplay()
    kept = f"what came is kept, and `satchel pull {model}` continues"
    whole = size(plan.missing_bytes)

    def report(step: str, fraction: float | None) -> None:
        progress.report(step if not plan.missing else f"{step} ({whole})", fraction)

    try:
        return str(resolve(model, report))
    except ModelLoadError as error:
        raise SatchelError(f"{error.message}; {kept}") from None
    except KeyboardInterrupt:
        raise SatchelError(f"interrupted; {kept}") from None
    finally:
        progress.close()
