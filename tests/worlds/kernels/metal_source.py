"""The text that MLX itself makes of our kernels for Metal: while a function is exported, which it does on any machine,
it writes a kernel's whole source, with the address spaces of its arguments, and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import pytest

from satchel.actors.replica.kernels import decode_kernel, gpu_kernels

from . import emulator

_metal_kernel = mx.fast.metal_kernel

BUFFERS_MAX, THREADGROUP_BYTES_MAX = 31, 32 * 2**10
"""What Metal has for a kernel: arguments, and memory that a group shares."""

_BUFFER = re.compile(r"^  (?:const )?(?:device|constant) (\w+)([*&]) \w+ \[\[buffer\(\d+\)\]\]", re.MULTILINE)
_ATTRIBUTE = re.compile(r"^  \w+ (\w+) \[\[\1\]\]", re.MULTILINE)
_CONSTANT = re.compile(r"(typename|int|bool) (\w+)")


@dataclass(frozen=True)
class Source:
    """A kernel as Metal gets it: `text` is a template and ends with its instance with `arguments`."""

    name: str
    text: str

    @cached_property
    def parts(self) -> tuple[str, str, list[str]]:
        """The template's parameters, the function, and the arguments."""
        text, _, instance = self.text.rpartition("\ntemplate [[host_name(")
        head, _, function = text.removeprefix("template <").partition(">\n")
        arguments = instance.rpartition(f"{self.name}<")[2].rpartition(">;")[0].split(", ")
        assert function.startswith(f"[[kernel]] void {self.name}(\n") and arguments != [""], self.text
        return head, function, arguments

    @cached_property
    def plain(self) -> str:
        """The function without a template: it begins with the constants."""
        head, function, arguments = self.parts
        constants = "".join(
            f"  using {name} = {value};\n" if kind == "typename" else f"  constexpr {kind} {name} = {value};\n"
            for (kind, name), value in zip(_CONSTANT.findall(head), arguments, strict=True)
        )
        return function.replace(") {\n", f") {{\n{constants}", 1)

    @property
    def instance(self) -> str:
        """The template, and its instance by name."""
        head, function, arguments = self.parts
        named = f"{self.name}<{', '.join(arguments)}>"
        return f"template <{head}>\n{function}\ntemplate decltype({named}) {named};\n"

    @property
    def types(self) -> tuple[str, ...]:
        """The template without its name, and those of its arguments that are types."""
        head, function, arguments = self.parts
        kinds = [kind for kind, _ in _CONSTANT.findall(head)]
        types = [value for kind, value in zip(kinds, arguments, strict=True) if kind == "typename"]
        return function.replace(self.name, ""), *types

    @cached_property
    def buffers(self) -> list[tuple[str, str]]:
        """The type of each argument in memory, and whether it is a pointer, "*", or one number, "&"."""
        return _BUFFER.findall(self.parts[1])

    @cached_property
    def on_cpu(self) -> str:
        """A text for `emulator.built`."""
        given = [f"{'*' if kind == '&' else ''}({name}*)given[{at}]" for at, (name, kind) in enumerate(self.buffers)]
        # No template, for compilers put what it shares not into the section where it is counted.
        return (
            f'#include "metal.h"\n{self.plain}\n'
            "static void body(void** given, int group, int thread) {\n"
            "  const uint3 threadgroup_position_in_grid{(uint)group, 0, 0};\n"
            "  const uint3 thread_position_in_threadgroup{(uint)thread, 0, 0};\n"
            "  const uint thread_index_in_simdgroup = thread & 31, simdgroup_index_in_threadgroup = thread >> 5;\n"
            f"  {self.name}({', '.join([*given, *_ATTRIBUTE.findall(self.plain)])});\n}}\n"
        )


@dataclass(frozen=True)
class Launch:
    """A kernel with its inputs; `how` are the other arguments that it was called with."""

    source: Source
    inputs: Sequence[mx.array]
    how: dict[str, Any]


Launched = Callable[[Launch], list[mx.array]]


@contextmanager
def kernels(launched: Launched) -> Iterator[None]:
    """Lets MLX think that it has Metal, and `launched` do what a launch does."""

    def metal_kernel(**named: Any) -> Callable[..., list[mx.array]]:
        real: Any = _metal_kernel(**named)

        def launch(*, inputs: Sequence[mx.array], **how: Any) -> list[mx.array]:
            return launched(Launch(_written(real, inputs, how), inputs, how))

        return launch

    def forget() -> None:
        gpu_kernels.kernel.cache_clear()
        decode_kernel._plan.cache_clear()
        decode_kernel._unchanged.cache_clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.fast, "metal_kernel", metal_kernel)
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(gpu_kernels, "is_available", lambda: True)
        mx.disable_compile()
        forget()
        try:
            yield
        finally:
            forget()
            mx.enable_compile()


def _written(kernel: Callable[..., list[mx.array]], inputs: Sequence[mx.array], how: dict[str, Any]) -> Source:
    found: list[dict[str, Any]] = []
    mx.export_function(found.append, lambda *arrays: kernel(inputs=list(arrays), **how), *inputs)
    (name, text), *_ = [step["arguments"][:2] for step in found if step.get("name") == "CustomKernel"]
    return Source(name, text)


def emulated(launch: Launch) -> list[mx.array]:
    """Runs a kernel's text on this CPU.

    Raises:
        RuntimeError: as `emulator.run`, or Metal has not what the kernel needs.
    """
    library = emulator.built(launch.source.on_cpu)
    if library.threadgroup_bytes() > THREADGROUP_BYTES_MAX or len(launch.source.buffers) > BUFFERS_MAX:
        raise RuntimeError(f"{launch.source.name} has more memory or arguments than Metal gives it")
    how = {name: value for name, value in launch.how.items() if name != "template"}
    return emulator.run(library, launch.inputs, **how)


def recorded(sources: dict[str, Source]) -> Launched:
    """Returns what only notes the kernels by their names, which MLX makes unique, and gives zeros."""

    def launched(launch: Launch) -> list[mx.array]:
        sources[launch.source.name] = launch.source
        shapes, dtypes = launch.how["output_shapes"], launch.how["output_dtypes"]
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    return launched
