"""Qwen3-VL in PyTorch, for training only: sequences end to end without padding, no cache. Names are Hugging Face's.

A sequence of the text model is a chat; one of the vision tower is a picture or a pair of a video's frames.
"""

# PyTorch is needed for training only and is not among the project's requirements.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from .layout import FRAMES, MERGE, PATCH, PictureModelShape


@dataclass(frozen=True, slots=True)
class Borders:
    """Where sequences start in a row that holds them end to end.

    Attributes:
        starts: of each, and the end of the last (sequences + 1,).
        longest: the most tokens in one.
        causal: whether a token sees only what comes before it.
    """

    starts: Tensor
    longest: int
    causal: bool


@dataclass(frozen=True, slots=True)
class Inputs:
    """A `data.Batch` on the device, and what follows from its grids.

    Attributes:
        tokens: (tokens,); positions: (3, tokens).
        seen: which tokens are parts of pictures, in order.
        frames: bytes (frames, 3 * 16 * 16); pairs: two of them a patch (patches, 2).
        corners, weights: the four nearest learned positions of each patch and their shares (patches, 4).
        places: each patch's row and column (patches, 2).
        chats, pictures: the borders in `tokens` and in `pairs`.
    """

    tokens: Tensor
    seen: Tensor
    positions: Tensor
    frames: Tensor
    pairs: Tensor
    corners: Tensor
    weights: Tensor
    places: Tensor
    chats: Borders
    pictures: Borders


def merged_first(values: Tensor) -> Tensor:
    """Rows of (rows, columns, ...) in the order of patches: those that become one token stand together."""
    rows, columns, *rest = values.shape
    values = values.view(rows // MERGE, MERGE, columns // MERGE, MERGE, *rest)
    return values.transpose(1, 2).reshape(rows * columns, *rest)


@functools.cache
def grid_positions(rows: int, columns: int, places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of one grid of patches: corners and weights (patches, 4), and row and column (patches, 2)."""
    side = int(places**0.5)
    down, across = torch.linspace(0, side - 1, rows), torch.linspace(0, side - 1, columns)
    top, left = down.long(), across.long()
    bottom, right = (top + 1).clamp(max=side - 1), (left + 1).clamp(max=side - 1)
    low, far = (down - top)[:, None], (across - left)[None, :]
    pairs = [(top, left), (top, right), (bottom, left), (bottom, right)]
    corners = torch.stack([row[:, None] * side + column[None, :] for row, column in pairs], dim=-1)
    weights = torch.stack([(1 - low) * (1 - far), (1 - low) * far, low * (1 - far), low * far], dim=-1)
    whole = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    return merged_first(corners), merged_first(weights), merged_first(whole)


def attend(queries: Tensor, keys: Tensor, values: Tensor, borders: Borders) -> Tensor:
    """Attention within each sequence: (tokens, heads, head) each; on a GPU in bfloat16, elsewhere one by one."""
    if queries.is_cuda:
        starts, longest = borders.starts, borders.longest
        window = (-1, 0) if borders.causal else (-1, -1)
        queries, keys, values = queries.bfloat16(), keys.bfloat16(), values.bfloat16()
        return varlen_attn(queries, keys, values, starts, starts, longest, longest, window_size=window)
    sizes = borders.starts.diff().tolist()
    parts = zip(*(part.transpose(0, 1).split(sizes, dim=1) for part in (queries, keys, values)), strict=True)
    done = [functional.scaled_dot_product_attention(*part, is_causal=borders.causal) for part in parts]
    return torch.cat(done, dim=1).transpose(0, 1)


def rotate(values: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turns (tokens, heads, head) by its positions (tokens, head), Hugging Face's halves convention."""
    first, second = values.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (values * cosines[:, None] + turned * sines[:, None]).to(values.dtype)


class PictureNormalization(nn.Module):
    """Root-mean-square normalization over the last axis."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, values: Tensor) -> Tensor:
        return functional.rms_norm(values, self.weight.shape, self.weight.to(values.dtype), self.epsilon)


class VisionAttention(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.heads = shape.vision_heads
        self.qkv = nn.Linear(shape.vision_hidden, 3 * shape.vision_hidden)
        self.proj = nn.Linear(shape.vision_hidden, shape.vision_hidden)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, borders: Borders) -> Tensor:
        queries, keys, values = self.qkv(hidden).view(len(hidden), 3, self.heads, -1).unbind(1)
        queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
        return self.proj(attend(queries, keys, values, borders).reshape(len(hidden), -1))


class VisionFeedForward(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.vision_hidden, shape.vision_intermediate)
        self.linear_fc2 = nn.Linear(shape.vision_intermediate, shape.vision_hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear_fc2(functional.gelu(self.linear_fc1(hidden), approximate="tanh"))


class VisionBlock(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.vision_hidden, eps=1e-6)
        self.norm2 = nn.LayerNorm(shape.vision_hidden, eps=1e-6)
        self.attn = VisionAttention(shape)
        self.mlp = VisionFeedForward(shape)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, borders: Borders) -> Tensor:
        hidden = hidden + self.attn(self.norm1(hidden), cosines, sines, borders)
        return hidden + self.mlp(self.norm2(hidden))


class Merger(nn.Module):
    """Four patches into one token of the text model; `late` normalizes them together."""

    def __init__(self, shape: PictureModelShape, late: bool) -> None:
        super().__init__()
        self.late, self.wide = late, shape.vision_hidden * MERGE**2
        self.norm = nn.LayerNorm(self.wide if late else shape.vision_hidden, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.wide, self.wide)
        self.linear_fc2 = nn.Linear(self.wide, shape.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.norm(hidden.view(-1, self.wide)) if self.late else self.norm(hidden).view(-1, self.wide)
        return self.linear_fc2(functional.gelu(self.linear_fc1(wide)))


class PatchEmbedding(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, shape.vision_hidden, (FRAMES, PATCH, PATCH), stride=(FRAMES, PATCH, PATCH))

    def forward(self, frames: Tensor, pairs: Tensor) -> Tensor:
        """Patches (patches, hidden) of frames in bytes (frames, 768) and which two make up a patch (patches, 2)."""
        values = (frames.float() / 255 - 0.5) / 0.5
        both = values[pairs].view(-1, FRAMES, 3, PATCH * PATCH).transpose(1, 2).flatten(1)
        return functional.linear(both, self.proj.weight.flatten(1), self.proj.bias)


class VisionTower(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = PatchEmbedding(shape)
        self.pos_embed = nn.Embedding(shape.places, shape.vision_hidden)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.vision_layers))
        self.merger = Merger(shape, late=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(shape, late=True) for _ in shape.deepstack)

    def forward(self, inputs: Inputs) -> tuple[Tensor, list[Tensor]]:
        """Tokens (patches / 4, hidden of the text model), and those for its first layers."""
        shape = self.shape
        places = (self.pos_embed(inputs.corners) * inputs.weights[..., None]).sum(1)
        hidden = self.patch_embed(inputs.frames, inputs.pairs) + places
        quarter = shape.vision_hidden // shape.vision_heads // 4
        rates = 10000.0 ** -(torch.arange(quarter, device=hidden.device) / quarter)
        angles = (inputs.places[..., None] * rates).flatten(1).repeat(1, 2)
        cosines, sines = angles.cos(), angles.sin()
        deep = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cosines, sines, inputs.pictures)
            if index in shape.deepstack:
                deep.append(self.deepstack_merger_list[len(deep)](hidden))
        return self.merger(hidden), deep


class PictureAttention(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head, shape.key_value_heads * shape.head
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = PictureNormalization(shape.head, shape.epsilon)
        self.k_norm = PictureNormalization(shape.head, shape.epsilon)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, borders: Borders) -> Tensor:
        length, head = len(hidden), self.shape.head
        queries = rotate(self.q_norm(self.q_proj(hidden).view(length, -1, head)), cosines, sines)
        keys = rotate(self.k_norm(self.k_proj(hidden).view(length, -1, head)), cosines, sines)
        values = self.v_proj(hidden).view(length, -1, head)
        share = self.shape.heads // self.shape.key_value_heads
        keys, values = keys.repeat_interleave(share, dim=1), values.repeat_interleave(share, dim=1)
        return self.o_proj(attend(queries, keys, values, borders).reshape(length, -1))


class PictureFeedForward(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class PictureLayer(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.self_attn = PictureAttention(shape)
        self.mlp = PictureFeedForward(shape)
        self.input_layernorm = PictureNormalization(shape.hidden, shape.epsilon)
        self.post_attention_layernorm = PictureNormalization(shape.hidden, shape.epsilon)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, borders: Borders) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cosines, sines, borders)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def rotations(positions: Tensor, shape: PictureModelShape) -> tuple[Tensor, Tensor]:
    """Cosines and sines (tokens, head): time, down and across take turns in the frequencies, time has the slowest."""
    half = shape.head // 2
    axis = torch.zeros(half, dtype=torch.long, device=positions.device)
    for number in (1, 2):
        axis[number : 3 * shape.sections[number] : 3] = number
    rates = shape.rope_theta ** -(torch.arange(half, device=positions.device) / half)
    angles = (positions.float()[axis].T * rates).repeat(1, 2)
    return angles.cos(), angles.sin()


class Text(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(PictureLayer(shape) for _ in range(shape.layers))
        self.norm = PictureNormalization(shape.hidden, shape.epsilon)

    def forward(self, inputs: Inputs, pictures: Tensor, deep: list[Tensor]) -> Tensor:
        """Last hidden states (tokens, hidden)."""
        hidden = self.embed_tokens(inputs.tokens)
        hidden = hidden.index_copy(0, inputs.seen, pictures.to(hidden.dtype))
        cosines, sines = rotations(inputs.positions, self.shape)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cosines, sines, inputs.chats)
            if index < len(deep):
                hidden = hidden.index_add(0, inputs.seen, deep[index].to(hidden.dtype))
        return self.norm(hidden)


class VisionDecoder(nn.Module):
    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.visual = VisionTower(shape)
        self.language_model = Text(shape)


class Shapes(nn.Module):
    """The whole model, embeddings tied; `state_dict` has the names of Qwen3VLForConditionalGeneration."""

    def __init__(self, shape: PictureModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = VisionDecoder(shape)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                deep = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight", "mlp.linear_fc2.weight"))
                nn.init.normal_(parameter, std=0.02 if not deep else 0.02 / (2 * shape.layers) ** 0.5)

    def hidden(self, inputs: Inputs) -> Tensor:
        """Last hidden states (tokens, hidden)."""
        pictures, deep = self.model.visual(inputs)
        return self.model.language_model(inputs, pictures, deep)

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.model.language_model.embed_tokens.weight)
