"""A model's context, wherever its config keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from satchel.actors.model_files.context import GUESS, context_length

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"n_positions": 1024, "n_ctx": 512}, 1024),
        ({"max_seq_len": 32_768}, 32_768),
        ({"max_sequence_length": 2048}, 2048),
        ({"max_context_length": 2048}, 2048),
        ({"context_length": 2048}, 2048),
        ({"max_seq_length": 2048}, 2048),
        ({"n_ctx": 2048}, 2048),
        ({"model_max_length": 1_048_576}, 1_048_576),
        ({"model_max_length": 10**30, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 512, "text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": 512, "text_config": {"hidden_size": 64}}, 512),
        ({"llm_config": {"max_position_embeddings": 32_768}}, 32_768),
        ({"language_config": {"max_position_embeddings": 16_384}}, 16_384),
        ({"thinker_config": {"text_config": {"max_position_embeddings": 65_536}}}, 65_536),
        ({"max_position_embeddings": 40_960, "rope_scaling": YARN}, 131_072),
        ({"max_position_embeddings": 40_960, "rope_parameters": {"full_attention": YARN, "sliding": None}}, 131_072),
        ({"max_position_embeddings": 131_072, "rope_scaling": LLAMA3}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"factor": "x", "original_max_position_embeddings": 1}},
            4096,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": "none", "text_config": "none"}, 4096),
    ],
)
def test_what_the_config_says(config: dict[str, Any], tokens: int):
    found = context_length(config)
    assert (found.tokens, found.guessed) == (tokens, False)


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": None}, {"n_positions": True}, {"max_seq_len": -1}])
def test_what_nobody_says_is_a_guess(config: dict[str, Any]):
    assert context_length(config).tokens == GUESS
    assert context_length(config).guessed
    library = context_length(config, SimpleNamespace(max_position_embeddings=131_072))
    assert (library.tokens, library.guessed) == (131_072, True)
