"""Qwen3 in PyTorch, for training only: one conversation a row, whole rows, no cache. Names are Hugging Face's."""

# PyTorch is needed for training only and is not among the project's requirements.
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from .layout import RecallShape


class Normalization(nn.Module):
    """Root-mean-square normalization over the last axis, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        wide = values.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight).to(values.dtype)


def rotations(length: int, shape: RecallShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary positions, each (length, head)."""
    exponents = torch.arange(0, shape.head, 2, device=device, dtype=torch.float64) / shape.head
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float64), shape.rope_theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns (rows, heads, length, head) by its positions, Hugging Face's halves convention."""
    first, second = values.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (values.float() * cosines + turned.float() * sines).to(values.dtype)


class Attention(nn.Module):
    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head, shape.key_value_heads * shape.head
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = Normalization(shape.head, shape.epsilon)
        self.k_norm = Normalization(shape.head, shape.epsilon)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        head = self.shape.head
        queries = self.q_norm(self.q_proj(hidden).view(rows, length, -1, head)).transpose(1, 2)
        keys = self.k_norm(self.k_proj(hidden).view(rows, length, -1, head)).transpose(1, 2)
        values = self.v_proj(hidden).view(rows, length, -1, head).transpose(1, 2)
        queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
        share = self.shape.heads // self.shape.key_value_heads
        keys, values = keys.repeat_interleave(share, dim=1), values.repeat_interleave(share, dim=1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Normalization(shape.hidden, shape.epsilon)
        self.post_attention_layernorm = Normalization(shape.hidden, shape.epsilon)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Normalization(shape.hidden, shape.epsilon)


class Recall(nn.Module):
    """The whole model; `state_dict` has the names of Hugging Face's Qwen3ForCausalLM with tied embeddings."""

    def __init__(self, shape: RecallShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 if not deep else 0.02 / (2 * shape.layers) ** 0.5)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states (rows, length, hidden) of token ids (rows, length)."""
        cosines, sines = rotations(tokens.shape[1], self.shape, tokens.device)
        hidden = functional.embedding(tokens, self.model.embed_tokens.weight)
        if torch.is_autocast_enabled():
            hidden = hidden.to(torch.bfloat16)
        for layer in self.model.layers:
            hidden = layer(hidden, cosines, sines)
        return self.model.norm(hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (rows, length, vocabulary)."""
        return functional.linear(self.hidden(tokens), self.model.embed_tokens.weight)


def losses(hidden: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every place in nats, flat: hidden (rows, length, hidden), targets (rows, length)."""
    logits = functional.linear(hidden, table).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets.flatten(), reduction="none")
