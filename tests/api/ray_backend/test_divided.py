"""Which KV the replica of a divided model has, and which it could use."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from satchel.actors.model_files.identity.model_identity import ModelIdentity
from satchel.actors.model_files.identity.model_parts import LAYERS, ModelPart, identity_of
from satchel.actors.protocol.replica_messages import StageInfo
from satchel.api.ray_backend.store import computed_by, usable_by
from tests.worlds.direct import model_info

COUNT = 6
WHOLE = ModelIdentity({"model/a": "1"}, {"dtype": "float32"})
PART = {ends: identity_of(WHOLE, ModelPart(*ends), COUNT) for ends in ((0, 4), (4, 6), (1, 5))}


@pytest.mark.parametrize("joins", [True, False])
def test_a_divided_model_has_the_kv_of_its_stages_and_uses_that_of_all_layers(joins: bool):
    stages = [StageInfo("studio", 0, 4), StageInfo("book", 4, 6)]
    leader = PART[4, 6]
    info = model_info(**asdict(leader), model_id=leader.model_id, stages=stages, joins=COUNT if joins else 0)
    assert info.computing[LAYERS] == "4 to 6 of 6"
    assert computed_by(info) == [PART[0, 4].model_id, leader.model_id]
    others = {WHOLE.model_id, PART[1, 5].model_id}
    assert usable_by(info) >= {*computed_by(info)} and (usable_by(info) & others == others) is joins


def test_a_model_in_shares_has_the_kv_of_its_shares_and_uses_that_of_all_parts():
    stages = [StageInfo("studio", 0, 6), StageInfo("book", 0, 6), StageInfo("mini", 0, 6)]
    shares = [identity_of(WHOLE, ModelPart(0, COUNT, share, 3), COUNT) for share in range(3)]
    info = model_info(**asdict(shares[2]), model_id=shares[2].model_id, stages=stages, joins=COUNT)
    assert info.computing[LAYERS] == "share 2 of 3 of all 6"
    assert computed_by(info) == [share.model_id for share in shares]
    assert usable_by(info) >= {WHOLE.model_id, PART[0, 4].model_id, *computed_by(info)}


def test_a_model_that_is_not_divided_has_its_own_kv():
    info = model_info(**asdict(WHOLE), model_id=WHOLE.model_id, joins=COUNT)
    assert computed_by(info) == [WHOLE.model_id] and PART[0, 4].model_id in usable_by(info)
    assert usable_by(model_info(**asdict(WHOLE), model_id=WHOLE.model_id)) == {WHOLE.model_id}
