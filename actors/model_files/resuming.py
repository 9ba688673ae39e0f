"""Downloads a file of the Hub so that an interrupted download continues, also in a later process. The Hub's client
keeps whole files only.

The bytes that came are in the cache, beside the whole files, under a name that the client does not use.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from filelock import FileLock, Timeout

from ...cluster.errors import ModelLoadError

_WAIT_S = 3600.0
"""How long to wait for another process that downloads the same file."""

_PIECE_BYTES = 2**24


def fetch(repository: str, commit: str, name: str, cache: Path, bar: type) -> None:
    """Downloads one file into the Hub's cache, where the client finds it.

    Args:
        cache: the folder with all repositories.
        bar: a class like tqdm's; its count begins with the bytes that are here already.

    Raises:
        ModelLoadError: the file is damaged, or another process downloads it for an hour.
        Exception: whatever the Hub's client raises. The bytes that came are kept.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    url, headers = hf_hub_url(repository, name, revision=commit), build_hf_headers()
    about = get_hf_file_metadata(url, headers=headers)
    if about.etag is None:
        # It has no name in the cache; the client says what is wrong.
        return
    blobs = cache / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    whole, part = blobs / about.etag, blobs / f"{about.etag}.begun.incomplete"
    try:
        with FileLock(part.with_suffix(".lock"), timeout=_WAIT_S):
            if whole.exists():
                return
            with part.open("ab") as file:
                http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=about.size, tqdm_class=bar)
            _check(part, about.etag, name)
            part.rename(whole)
    except Timeout:
        raise ModelLoadError(f"another process has been downloading {name} of {repository} for an hour") from None


def _check(part: Path, etag: str, name: str) -> None:
    """Removes a file whose content is not what its name says: large files are named by their SHA-256.

    Raises:
        ModelLoadError: it is damaged.
    """
    if not re.fullmatch("[0-9a-f]{64}", etag):
        return
    digest = hashlib.sha256()
    with part.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != etag:
        part.unlink()
        raise ModelLoadError(f"{name} came damaged and was removed: download it again")
