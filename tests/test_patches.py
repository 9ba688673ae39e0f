"""Other libraries' insides are changed and used in the files for that alone, and docs/patches.md has each patch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCHES = ("cluster/patches.py", "actors/patches.py", "api/patches.py")
DOCS = (ROOT / "docs/patches.md").read_text(encoding="utf-8")

LIBRARIES = {"uvicorn", "ray", "mlx", "mlx_lm", "mlx_vlm", "transformers", "tokenizers", "llguidance"}
INSIDES = ("uvicorn.protocols", "ray.experimental.internal_kv", "transformers.dynamic_module_utils")
"""Modules that no library documents, though their names do not say so."""

OWN_IN_ONE_FILE = {
    "actors/replica/actor.py",
    "actors/replica/loop/engine.py",
    "actors/replica/kv/paged_cache.py",
    "api/client/agent.py",
    "api/requests/request_body.py",
}
"""Files whose classes use private names of others in the same file, or of the same class."""
NAMED_TUPLES = {"_make", "_fields", "_replace", "_asdict"}
DOCUMENTED = {
    "tokenizers": {"decoder", "normalizer", "pre_tokenizer", "encode_special_tokens"},
    "transformers, mlx-vlm: a processor's parts": {"image_processor", "video_processor"},
    "mlx-vlm: a model's part": {"language_model"},
    "mlx-lm: a recurrent layer's arrays": {"cache"},
    "uvicorn": {"should_exit"},
    "Starlette, FastAPI": {"headers", "openapi", "openapi_schema"},
    "typer, click, rich": {"obj", "params", "quiet"},
    "Python": {"stdout", "daemon", "text_factory", "argtypes", "restype"},
    "Python's functions": {"__name__", "__qualname__", "__module__", "__doc__"},
    "Python's ssl": {"minimum_version", "check_hostname", "verify_mode", "verify_flags"},
    "Python's logging": {"propagate"},
    "Starlette: an application's own state": {"end_streams"},
    "Python's reprlib": {"maxstring", "maxother", "maxlong"},
}
"""What the code sets of objects that are not its own: attributes that are there to be set."""
SETS = re.compile(
    r"(set|del)attr|(object|dict|type)\.(__(set|del)attr__|clear|update|pop|setdefault)|importlib\.reload"
    r"|(vars\(.*\)|.*\.__dict__)\.(clear|update|pop|popitem|setdefault)"
)
"""Functions that set attributes of what they are given."""


def sources() -> dict[str, ast.Module]:
    paths = [path for package in ("cluster", "actors", "api") for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def own_fields(tree: ast.Module) -> set[str]:
    """The attributes that the classes of a file have, without their methods."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
                if isinstance(part, ast.FunctionDef) and any(map(is_setter, part.decorator_list)):
                    found.add(part.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_setter(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Attribute) and decorator.attr == "setter"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def pokes(tree: ast.Module, fields: set[str], *, own_private: bool = False) -> Iterator[str]:
    """Yields what a file does to objects that are not its own.

    Args:
        fields: attributes of the project's classes.
        own_private: whether private names of its own classes may be used from outside of them.
    """
    nodes = list(ast.walk(tree))
    mine = own_fields(tree) | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    bases = {name for node in nodes for name in names_of_libraries(node)}
    for node in nodes:
        for module in imported(node):
            if is_inside(module):
                yield f"imports {module}"
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="_exit"):
                pass
            case ast.Attribute(value=value, attr=name) if is_private(name) and not is_self(value):
                if name not in NAMED_TUPLES and not (own_private and name in mine):
                    yield f"uses {ast.unparse(node)}"
            case ast.Attribute(value=value, attr=name, ctx=ast.Store() | ast.Del()) if not is_self(value):
                if name not in fields and not any(name in each for each in DOCUMENTED.values()):
                    yield f"sets {ast.unparse(node)}"
            case ast.keyword(arg=name) if is_private(name) and name not in fields:
                yield f"gives {name}"
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]):
                if is_private(name):
                    yield f"uses {ast.unparse(node)}"
            case ast.Call(func=ast.Name() | ast.Attribute()) if SETS.fullmatch(ast.unparse(node.func)):
                if not any(map(is_self, node.args[:1])):
                    yield f"sets by {ast.unparse(node)}"
            case ast.ClassDef():
                for base in node.bases:
                    if re.split(r"\W", ast.unparse(base))[0] in bases:
                        yield f"makes {node.name} of {ast.unparse(base)}"


def names_of_libraries(node: ast.AST) -> list[str]:
    """The names under which a file imports what a class could be made of; those of `mlx.nn` are made for that."""
    names = [alias.asname or alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
    modules = zip(names, imported(node), strict=False)
    return [name for name, module in modules if is_of_library(module) and not module.startswith("mlx.nn")]


def is_of_library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def is_inside(module: str) -> bool:
    private = any(map(is_private, module.split("."))) or any(f"{module}.".startswith(f"{each}.") for each in INSIDES)
    return private and is_of_library(module)


def test_nothing_else_pokes_into_other_libraries():
    trees = sources()
    fields = {name for tree in trees.values() for name in own_fields(tree)}
    found = [
        f"{path}: {poke}"
        for path, tree in trees.items()
        if path not in PATCHES
        for poke in pokes(tree, fields, own_private=path in OWN_IN_ONE_FILE)
    ]
    assert not found, "\n".join(["this belongs into a patches.py:", *found])


@pytest.mark.parametrize(
    "code",
    [
        "from ray._private import services",
        "import ray.serve._private.replica",
        "from ray.serve import _private",
        "def f():\n    from uvicorn.protocols.http import h11_impl",
        "from mlx_lm.models.cache import _BaseCache",
        "from transformers import dynamic_module_utils",
        "cache._temporal_order(x)",
        "self.inner = wrapper._tokenizer",
        "self._server._serve()",
        "getattr(module, '_freqs', None)",
        "ray.init(_temp_dir='x')",
        "setattr(module, 'attention', mine)",
        "object.__setattr__(module, 'norm', stand_in)",
        "dict.clear(module)",
        "vars(module).clear()",
        "vars(module).update(before)",
        "importlib.reload(ray_constants)",
        "layer.__class__ = Other",
        "model.sanitize = read",
        "cache.make_mask = noting",
        "del model.sanitize",
        "services.start_ray_process = start",
        "server.capture_signals = nothing",
        "import uvicorn\nclass Own(uvicorn.Server): pass",
        "from mlx_lm.models.cache import KVCache\nclass Own(KVCache): pass",
    ],
)
def test_a_poke_is_seen(code: str):
    assert list(pokes(ast.parse(code), {"offset"}))


@pytest.mark.parametrize(
    "code",
    [
        "self._tokenizer = 1\nself._tokenizer.encode('a')",
        "cache.offset = 7",
        "server.should_exit = True",
        "row._replace(a=1)",
        "os._exit(1)",
        "object.__setattr__(self, 'marks', marks)",
        "import mlx.nn as nn\nclass Own(nn.Linear): pass",
        "from ray.exceptions import RayError",
        "seen.update(found)",
    ],
)
def test_what_is_documented_is_no_poke(code: str):
    assert not list(pokes(ast.parse(code), {"offset"}))


def patches() -> list[tuple[str, str, str]]:
    """The patches of each file: file, name, docstring."""
    found = []
    for path in PATCHES:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and node.name != "Change"
            ):
                found.append((path, node.name, ast.get_docstring(node) or ""))
    return found


def section(docstring: str, name: str) -> str:
    """What a docstring says under a name, on one line."""
    found = re.search(rf"^{name}: (.*(?:\n +.*)*)", docstring, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


@pytest.mark.parametrize(("path", "name", "docstring"), patches(), ids=[name for _, name, _ in patches()])
def test_every_patch_says_why_and_who_notices(path: str, name: str, docstring: str):
    assert section(docstring, "Changes") and section(docstring, "Why"), "what it changes, and why"
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    fits = re.findall(r"([a-z-]+) (\d[\d.]*\d)", section(docstring, "Fits"))
    assert fits and fits == [(library, pins[library]) for library, _ in fits], "the versions that are installed"
    file, _, test = section(docstring, "Noticed by").partition("::")
    assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    (sequence,) = (line for line in DOCS.splitlines() if line.startswith(f"| `{name}` |"))
    assert f"{test}`" in sequence and f"`{path}`" in DOCS
    for library, version in fits:
        assert f"{library} {version}" in DOCS


def test_the_page_has_no_other_patch():
    listed = re.findall(r"^\| `(\w+)` \|", DOCS, re.MULTILINE)
    assert sorted(listed) == sorted(name for _, name, _ in patches())
