"""Whether a store's index and files agree."""

from __future__ import annotations

from .recovery import segment_files, segment_path
from .segment_reader import Failure, read_entries, read_header
from .segments import FINISHED, session_of
from .shelf import Shelf
from .tenant_files import TenantFiles


def check_shelf(shelf: Shelf, *, payload: bool) -> None:
    """Raise AssertionError where index and files disagree; with `payload` every live entry is read."""
    index = shelf.index
    assert index.integrity() == []
    assert index.bad_segments() == set()
    segments = index.segments()
    files = {file.path: file for file in segment_files(shelf.root)}
    doomed = {name for name, _, _ in index.doomed()}
    nbytes = sum(size for _, _, size in index.doomed())
    answered: set[bytes] = set()
    for segment in segments:
        path = segment_path(shelf.root, segment)
        file = files.pop(path, None)
        assert file is not None and file.nbytes == segment.nbytes, f"{path} is not as the index says"
        assert session_of(segment.name) is not None and segment.name.endswith(FINISHED)
        header = read_header(path, shelf.key)
        rows = index.of_segment(segment.number)
        assert any(row.live for row in rows), f"{path} answers for nothing"
        for row in rows:
            assert row.record == header.record.entries[row.slot], f"{path} holds another entry in slot {row.slot}"
        live = [row for row in rows if row.live]
        ids = {row.record.id for row in live}
        assert not ids & answered, "two copies answer for one id"
        answered |= ids
        nbytes += segment.nbytes
        if payload:
            read = read_entries(shelf.root, shelf.key, [row.location for row in live])
            assert not any(isinstance(stored, Failure) for stored in read), f"{path} does not verify"
    assert index.size()[0] == nbytes
    again = TenantFiles()
    again.load(index.files_of_tenants())
    assert index.tenants.counted() == again.counted(), "files of tenants are counted wrong"
    assert index.counts()[1] == len(answered)
    strays = {path.name for path in files if session_of(path.name) == "store"} - doomed
    assert not strays, f"nobody knows {strays}"
