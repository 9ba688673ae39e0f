"""Updates of one sequence put together: nothing that one of them says is lost."""

from __future__ import annotations

from satchel.actors.protocol.replica_messages import SequenceUpdate
from satchel.actors.protocol.updates import merged


def test_what_only_one_of_them_says_is_kept():
    admitted = SequenceUpdate("r", [], cached_tokens=5, disk_tokens=2, queued_s=0.5)
    first = merged(admitted, SequenceUpdate("r", [1], prefill_s=0.25))
    assert first == SequenceUpdate("r", [1], cached_tokens=5, disk_tokens=2, queued_s=0.5, prefill_s=0.25)
    error = {"kind": "GenerationFailed"}
    last = SequenceUpdate("r", [2], "error", error=error)
    whole = SequenceUpdate("r", [1, 2], "error", 5, error, disk_tokens=2, queued_s=0.5, prefill_s=0.25)
    assert merged(first, last) == whole
    again = SequenceUpdate("r", [3], cached_tokens=7, disk_tokens=1, queued_s=1.0, prefill_s=2.0)
    later = SequenceUpdate("r", [1, 3], cached_tokens=7, disk_tokens=1, queued_s=1.0, prefill_s=2.0)
    assert merged(first, again) == later, "the later one is right"


def test_merged_updates_keep_every_tokens_logprobs():
    """An update without tokens has no logprobs, whichever comes first."""
    entries = [(-0.5, [(7, -0.5)]), (-1.0, [(8, -1.0)]), (-2.0, [(9, -2.0)])]
    first = SequenceUpdate("r", [], cached_tokens=5)
    whole = first
    for token, entry in zip([7, 8, 9], entries, strict=True):
        whole = merged(whole, SequenceUpdate("r", [token], logprobs=[entry]))
    whole = merged(whole, SequenceUpdate("r", [], "stop"))
    assert whole == SequenceUpdate("r", [7, 8, 9], "stop", 5, None, entries)
    assert merged(first, SequenceUpdate("r", [7])).logprobs is None
