"""Kernels that write blocks into the pool and copy them out. `attention.py` and `decode_kernel.py` read them in
place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate

import mlx.core as mx

from ...protocol.block_ids import BLOCK_TOKENS
from .gpu_kernels import Template, int_numbers, kernel, units
from .sealing import Sealed, SealPolicy, seal, value_group

_WRITE = """
  const int n = GROUP / PARTS, from = (GROUP % PARTS) * 256 + THREAD; const long to = slots[n];
  #define COPY(T, pool, fresh, size) \\
    for (int i = from; i < size; i += PARTS * 256) ((DEVICE T*)pool)[to * size + i] = fresh[(long)n * size + i];
  COPIES
  if (GROUP == 0 && THREAD == 0) done[0] = 0;
"""

# Fields of blocks lie `starts` bytes after the beginning of each block's record of RECORD bytes.
_WRITE_RECORDS = """
  const int n = GROUP / PARTS, from = (GROUP % PARTS) * 256 + THREAD; const long to = slots[n];
  #define COPY(T, pool, at, size) { \\
    const DEVICE T* fresh = (const DEVICE T*)(records + (long)n * RECORD + starts[at]); \\
    for (int i = from; i < size; i += PARTS * 256) ((DEVICE T*)pool)[to * size + i] = fresh[i]; }
  COPIES
  if (GROUP == 0 && THREAD == 0) done[0] = 0;
"""

_READ_RECORDS = """
  const int n = GROUP / PARTS, from = (GROUP % PARTS) * 256 + THREAD; const long at = slots[n];
  #define COPY(T, pool, start, size) { \\
    DEVICE T* to = (DEVICE T*)(records + (long)n * RECORD + start); \\
    for (int i = from; i < size; i += PARTS * 256) to[i] = pool[at * size + i]; }
  COPIES
"""

# Template: T, DK, DV, PV, VG, KV, KB as in `decode_kernel.py`. A group of threads has a quarter of a block of a
# sequence's KV head, or 64 tokens that are not sealed; `sizes` are the numbers of blocks and of those tokens. Keys lie
# transposed, so their codes pass through shared memory; a thread has eight tokens of two channels.
_UNSEAL = """
  constexpr int KW = 8 * KB, KS = 256 / KG, PW = PV / 8, QW = 2 * KB, QS = KG < 64 ? 64 / KG : 1, EW = sizeof(T) / 2;
  union Eight { uint4 words[EW]; T x[8]; };
  union Two { unsigned int words[EW]; T x[2]; };
  // Padded, so that neighbours read different banks.
  SHARED unsigned int codes_s[DK * (QW + 1)];
  SHARED float scales_s[DK * QS];
  SHARED float biases_s[DK * QS];
  const int used = sizes[0], C = sizes[1], places = 4 * used + (C + 63) / 64;
  const int place = GROUP % places, rk = GROUP / places;
  const long row0 = (long)rk * (used * 256 + C);
  if (place >= 4 * used) {
    const int first = (place - 4 * used) * 64, count = C - first < 64 ? C - first : 64;
    const long from = (long)rk * C + first, to = row0 + used * 256 + first;
    for (int i = THREAD; i < count * DK / 2 * EW; i += 256)
      ((DEVICE unsigned int*)(keys + to * DK))[i] = ((const DEVICE unsigned int*)(open_keys + from * DK))[i];
    for (int i = THREAD; i < count * DV / 2 * EW; i += 256)
      ((DEVICE unsigned int*)(values + to * DV))[i] = ((const DEVICE unsigned int*)(open_values + from * DV))[i];
    return;
  }
  const int quarter = place & 3;
  const long base = (long)slots[rk / KV * used + place / 4] * KV + rk % KV, to = row0 + place * 64;
  for (int i = THREAD; i < DK * QW; i += 256)
    codes_s[i / QW * (QW + 1) + i % QW] = key_codes[(base * DK + i / QW) * KW + quarter * QW + i % QW];
  for (int i = THREAD; i < DK * QS; i += 256) {
    const long at = (base * DK + i / QS) * KS + quarter * 64 / KG + i % QS;
    scales_s[i] = static_cast<float>(key_scales[at]);
    biases_s[i] = static_cast<float>(key_biases[at]);
  }
  for (int i = THREAD; i < 64 * PW; i += 256) {
    const int w = i % PW;
    const long token = base * 256 + quarter * 64 + i / PW;
    const unsigned int word = value_codes[token * PW + w];
    const float s = static_cast<float>(value_scales[token * (PV / VG) + w * 8 / VG]);
    const float b = static_cast<float>(value_biases[token * (PV / VG) + w * 8 / VG]);
    const bool exact = quarter == 0 && i < PW;
    Eight eight;
    #pragma unroll
    for (int j = 0; j < 8; j++) {
      const int d = w * 8 + j;
      const float number = s * static_cast<float>((word >> (4 * j)) & 15u) + b;
      eight.x[j] = exact && d < DV ? value_exact[base * DV + d] : static_cast<T>(number);
    }
    const long at = (to + i / PW) * DV + w * 8;
    if (DV % 8 == 0) {
      for (int e = 0; e < EW; e++) if (w * 8 < DV) ((DEVICE uint4*)values)[at / 8 * EW + e] = eight.words[e];
    } else {
      for (int j = 0; j < 8 && w * 8 + j < DV; j++) values[at + j] = eight.x[j];
    }
  }
  SYNC();
  for (int i = THREAD; i < 8 * (DK / 2); i += 256) {
    const int d = i % (DK / 2) * 2, eight = i / (DK / 2);
    #pragma unroll
    for (int j = 0; j < 8; j++) {
      const int t = eight * 8 + j, bit = t * KB;
      Two two;
      #pragma unroll
      for (int n = 0; n < 2; n++) {
        const int word = (d + n) * (QW + 1) + bit / 32, at = (d + n) * QS + t / KG % QS;
        unsigned int code = codes_s[word] >> (bit % 32);
        if (bit % 32 + KB > 32) code |= codes_s[word + 1] << (32 - bit % 32);
        const float number = scales_s[at] * static_cast<float>(code & ((1u << KB) - 1u)) + biases_s[at];
        two.x[n] = t == 0 && quarter == 0 ? key_exact[base * DK + d + n] : static_cast<T>(number);
      }
      for (int e = 0; e < EW; e++)
        ((DEVICE unsigned int*)keys)[((to + t) * DK + d) / 2 * EW + e] = two.words[e];
    }
  }
"""

# Template: UK, DK, UV and DV (`units` of keys and values), KV heads, REST (whether blocks are full). A group of threads
# has 64 columns of a sequence's KV head. `numbers` are the columns of the old arrays, of the new, and of the results;
# then the old tokens of each sequence, then its blocks that are full.
_APPEND = """
  const int W = numbers[0], N = numbers[1], C = numbers[2], sequences = numbers[3];
  const int parts = C / 64, places = parts + 4 * REST, place = GROUP % places, rk = GROUP / places, s = rk / KV;
  const int old = numbers[4 + s], filled = numbers[4 + sequences + s] * 256;
  const int first = place < parts ? place * 64 : filled + (place - parts) * 64;
  #define APPEND(U, D, from_old, from_new, joined, rest) \\
    for (int i = THREAD; i < 64 * D; i += 256) { \\
      const int at = first + i / D, column = at < C ? at : C - 1, fresh = column - old, d = i % D; \\
      const U x = fresh < 0 ? ((const DEVICE U*)from_old)[((long)rk * W + column) * D + d] \\
        : fresh < N ? ((const DEVICE U*)from_new)[((long)rk * N + fresh) * D + d] : static_cast<U>(0.f); \\
      if (place < parts) ((DEVICE U*)joined)[((long)rk * C + column) * D + d] = x; \\
      else ((DEVICE U*)rest)[((long)rk * 256 + at - filled) * D + d] = x; \\
    }
  APPEND(UK, DK, old_keys, new_keys, keys, rest_keys)
  APPEND(UV, DV, old_values, new_values, values, rest_values)
"""

# Template: as for `_APPEND`, without REST. A group of threads has 64 columns of a row's KV head. `numbers` are the
# columns and rows of the first arrays, then of the second.
_STACK = """
  const int place = GROUP % 4 * 64, row = GROUP / 4 / KV, kv = GROUP / 4 % KV;
  const bool upper = row < numbers[1];
  const int W = numbers[upper ? 0 : 2], own = upper ? row : row - numbers[1];
  const int count = own < numbers[upper ? 1 : 3] ? W : 0;
  #define STACK(U, D, first, second, stacked) \\
    for (int i = THREAD; i < 64 * D; i += 256) { \\
      const int column = place + i / D; \\
      const long from = (((long)own * KV + kv) * W + column) * D + i % D; \\
      const U x = column < count ? ((const DEVICE U*)(upper ? first : second))[from] : static_cast<U>(0.f); \\
      ((DEVICE U*)stacked)[((long)(GROUP / 4) * 256 + column) * D + i % D] = x; \\
    }
  STACK(UK, DK, first_keys, second_keys, keys)
  STACK(UV, DV, first_values, second_values, values)
"""


@cache
def empty_slot(kv_heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype, policy: SealPolicy) -> Sealed:
    """Returns a slot of zeros as a whole pool, for sequences of which none has a sealed block."""
    shape = (1, kv_heads, BLOCK_TOKENS)
    empty = seal(mx.zeros((*shape, key_dim), dtype), mx.zeros((*shape, value_dim), dtype), policy)
    mx.eval(empty)
    return empty


def write(pool: Sealed, slots: mx.array, blocks: Sealed, order: mx.array) -> mx.array:
    """Writes blocks into slots, in place (`gpu_kernels.py`). Nothing may read these slots yet.

    MLX's own assignment would copy a whole array of the pool if a step in flight reads it.

    Args:
        slots: (n,) uint32.
        blocks: n blocks, in the shapes of the pool's arrays except for the first axis.
        order: (1,) uint32; the kernel runs after this is computed.

    Returns:
        (1,) uint32, a zero that is computed once the blocks are written.
    """
    fresh = {f"new_{name}": array for name, array in zip(pool._fields, blocks, strict=True)}
    return _copied(f"write_{len(fresh)}", _WRITE, pool, slots, order, list(fresh), fresh)


def write_records(pool: Sealed, slots: mx.array, records: mx.array, starts: Sequence[int], order: mx.array) -> mx.array:
    """As `write`, for blocks in records.

    Args:
        records: `(n, nbytes) uint8`.
        starts: where each array begins in a record, in bytes; multiples of four, as `nbytes`.
    """
    places, told = [str(at) for at in range(len(starts))], int_numbers(*starts)
    return _copied(
        f"write_records_{len(starts)}",
        _WRITE_RECORDS,
        pool,
        slots,
        order,
        places,
        {"records": records, "starts": told},
        [("RECORD", records.shape[1])],
    )


def read_records(pool: Sealed, slots: mx.array, order: mx.array) -> mx.array:
    """Copies blocks out of their slots into records, each array behind the one before.

    Args:
        pool: arrays whose sizes are multiples of four bytes.
        slots: (n,) uint32.
        order: (1,) uint32; the kernel runs after this is computed.

    Returns:
        `(n, nbytes) uint8`.
    """
    starts = [0, *accumulate(array.nbytes // array.shape[0] for array in pool)]
    copies = "".join(f"COPY(T{at}, {field}, {starts[at]}, N{at})\n  " for at, field in enumerate(pool._fields))
    sizes = _sizes_of(pool)
    parts = _parts_of(sizes)
    body = _READ_RECORDS.replace("COPIES", copies)
    # The starts are in the text, so the name says them.
    name = f"read_records_{'_'.join(map(str, starts))}"
    return kernel(name, (*pool._fields, "slots", "order"), ("records",), body)(
        inputs=[*pool, slots, order],
        template=[("PARTS", parts), ("RECORD", starts[-1]), *_arrays_of(pool, sizes)],
        grid=(slots.size * parts * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(slots.size, starts[-1])],
        output_dtypes=[mx.uint8],
    )[0]


def _sizes_of(pool: Sealed) -> list[int]:
    return [array.size // array.shape[0] for array in pool]


def _parts_of(sizes: Sequence[int]) -> int:
    """Returns how many groups of threads copy a block."""
    return max(1, min(64, max(sizes) // 2048))


def _arrays_of(pool: Sealed, sizes: Sequence[int]) -> Template:
    """Returns the types and sizes of a block's arrays, as constants."""
    types = ((f"T{at}", array.dtype) for at, array in enumerate(pool))
    return [*types, *((f"N{at}", size) for at, size in enumerate(sizes))]


def _copied(
    name: str,
    body: str,
    pool: Sealed,
    slots: mx.array,
    order: mx.array,
    sources: Sequence[str],
    inputs: Mapping[str, mx.array],
    template: Template = (),
) -> mx.array:
    """Launches a kernel that copies blocks into slots.

    Args:
        name: unique, with the number of the pool's arrays.
        sources: for each array the source that the body's `COPY` gets.
        inputs, template: the kernel's other inputs and constants.

    Returns:
        As `write`.
    """
    sizes = _sizes_of(pool)
    parts = _parts_of(sizes)
    pairs = enumerate(zip(pool._fields, sources, strict=True))
    copies = "".join(f"COPY(T{at}, {field}, {source}, N{at})\n  " for at, (field, source) in pairs)
    read = (*pool._fields, *inputs, "slots", "order")
    return kernel(name, read, ("done",), body.replace("COPIES", copies))(
        inputs=[*pool, *inputs.values(), slots, order],
        template=[("PARTS", parts), *template, *_arrays_of(pool, sizes)],
        grid=(slots.size * parts * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.uint32],
    )[0]


def unseal(
    pool: Sealed, table: mx.array, keys: mx.array, values: mx.array, policy: SealPolicy, order: mx.array
) -> tuple[mx.array, mx.array]:
    """Dequantizes sequences' blocks, and appends what is not sealed.

    Args:
        table: (sequences, blocks) uint32, slots.
        keys, values: (sequences, kv_heads, tokens, dim), what is not sealed.
        order: (1,) uint32; the kernel runs after this is computed.

    Returns:
        Keys and values, (sequences, kv_heads, 256 * blocks + tokens, dim), in the dtype of `keys`.

    Raises:
        ValueError: a head has an odd number of channels.
    """
    if keys.shape[3] % 2 or values.shape[3] % 2:
        raise ValueError("the kernel reads two channels of a head at once")
    sequences, kv_heads, tokens, key_dim = keys.shape
    value_dim, blocks = values.shape[3], table.shape[1]
    groups = sequences * kv_heads * (4 * blocks + -(-tokens // 64))
    length = blocks * BLOCK_TOKENS + tokens
    inputs = (*pool._fields, "slots", "sizes", "open_keys", "open_values", "order")
    made = kernel("unseal", inputs, ("keys", "values"), _UNSEAL)(
        inputs=[*pool, table, int_numbers(blocks, tokens), keys, values, order],
        template=[
            *(("T", keys.dtype), ("DK", key_dim), ("DV", value_dim), ("PV", -(-value_dim // 32) * 32)),
            *(("VG", value_group(value_dim)), ("KV", kv_heads)),
            *(("KB", policy.key_bits), ("KG", policy.key_group)),
        ],
        grid=(groups * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(sequences, kv_heads, length, key_dim), (sequences, kv_heads, length, value_dim)],
        output_dtypes=[keys.dtype] * 2,
    )
    return made[0], made[1]


def append(
    old: tuple[mx.array, mx.array] | None,
    new: tuple[mx.array, mx.array],
    opened: Sequence[int],
    full: Sequence[int],
    columns: int,
) -> tuple[list[mx.array], list[mx.array]]:
    """Appends new tokens to sequences' open blocks.

    Args:
        old, new: keys and values, (sequences, kv_heads, tokens, dim); None for no old ones.
        opened: how many of the old tokens each sequence has.
        full: how many blocks are full of each sequence's old and new tokens.
        columns: of the results; a multiple of 256.

    Returns:
        Keys and values of the old tokens, of the new ones, and zeros, (sequences, kv_heads, columns, dim). Then the
        256 columns of each sequence that come after its full blocks; an empty list if no block is full.
    """
    sequences, kv_heads, tokens, key_dim = new[0].shape
    before, rest = new if old is None else old, int(any(full))
    dims, heads = (key_dim, new[1].shape[3]), (sequences, kv_heads)
    names = ("keys", "values", "rest_keys", "rest_values")
    made = kernel("append", ("old_keys", "old_values", "new_keys", "new_values", "numbers"), names, _APPEND)(
        inputs=[*before, *new, int_numbers(before[0].shape[2], tokens, columns, sequences, *opened, *full)],
        template=[
            *(*units("K", new[0].dtype, dims[0]), *units("V", new[1].dtype, dims[1])),
            *(("KV", kv_heads), ("REST", rest)),
        ],
        grid=(sequences * kv_heads * (columns + rest * BLOCK_TOKENS) // 64 * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(*heads, count, dim) for count in (columns, BLOCK_TOKENS if rest else 1) for dim in dims],
        output_dtypes=[new[0].dtype] * 4,
    )
    return made[:2], made[2:] if rest else []


def stack(first: tuple[mx.array, mx.array], second: tuple[mx.array, mx.array], rows: int) -> tuple[mx.array, mx.array]:
    """Puts the open blocks of some sequences behind those of others.

    Args:
        first, second: keys and values, (sequences, kv_heads, tokens, dim), at most 256 tokens.
        rows: of the results, at least all sequences.

    Returns:
        Keys and values, (rows, kv_heads, 256, dim), with zeros where there are no tokens.
    """
    (count, kv_heads, tokens, _), (others, _, columns, _) = first[0].shape, second[0].shape
    dims = first[0].shape[3], first[1].shape[3]
    inputs = ("first_keys", "first_values", "second_keys", "second_values", "numbers")
    made = kernel("stack", inputs, ("keys", "values"), _STACK)(
        inputs=[*first, *second, int_numbers(tokens, count, columns, others)],
        template=[
            *(*units("K", first[0].dtype, dims[0]), *units("V", first[1].dtype, dims[1])),
            ("KV", kv_heads),
        ],
        grid=(rows * kv_heads * 4 * 256, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(rows, kv_heads, BLOCK_TOKENS, dim) for dim in dims],
        output_dtypes=[first[0].dtype] * 2,
    )
    return made[0], made[1]
