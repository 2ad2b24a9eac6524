"""The rules of the code base as functions over source text, so that each can be shown to fail on a planted snippet."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "pagerunner"

# A module may import from a lower level, from its own part, and from the peers named here.
LEVELS: dict[str, int] = {
    "errors": 0,
    "limits": 0,
    "types": 0,
    "config": 0,
    "demo": 0,  # files only
    "cgroups": 0,
    "threads": 0,
    "logs": 0,
    "children": 0,
    "life": 0,
    "vllm_flags": 0,
    "memory": 1,
    "sched": 1,
    "tiers": 1,
    "batch": 2,
    "ops": 2,
    "dist": 2,
    "attention": 3,
    "quant": 3,
    "layers": 4,
    "models": 5,
    "text": 5,  # reads the model directory's files beside its configuration
    "lora": 5,
    "runner": 6,
    "engine": 7,
    "llm": 8,
    "server": 8,
    "cli": 8,
    "eval": 8,
    "bench": 8,
    "": 8,  # the package itself: the public names
    "__main__": 8,
}
PEERS: set[tuple[str, str]] = {
    ("ops", "batch"),
    ("types", "errors"),
    ("types", "limits"),
    ("config", "errors"),
    ("vllm_flags", "errors"),
    ("threads", "cgroups"),
    ("children", "limits"),
    ("children", "errors"),
    ("sched", "memory"),
    ("sched", "tiers"),
    ("tiers", "memory"),
    ("text", "models"),
    ("lora", "models"),
    ("cli", ""),
    ("cli", "llm"),
    ("cli", "server"),
    ("cli", "eval"),
    ("cli", "bench"),
    ("bench", "llm"),
    ("", "llm"),
    ("server", ""),
    ("__main__", "cli"),
}
# What stands on top uses the engine's front ends; it doesn't reach into the parts below them.
FRONT = {"server", "cli", "eval", "bench"}
CLOSED_TO_FRONT = {"sched", "batch", "ops", "dist", "attention", "quant", "layers", "runner", "lora"}
TORCH_FREE = {"errors", "limits", "types", "config", "memory", "sched", "tiers", "text"}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_CODE_LINES = 72_449  # of the package, without blank lines, comments and docstrings

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
_UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
_UNSAFE_ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "trust_remote_code"}
_MAY_START_PROCESSES = {"pagerunner.children", "pagerunner.ops.native.library"}  # the second one starts compilers
_STARTS_A_PROCESS = re.compile(
    r"(.*\.)?(Popen|create_subprocess_\w+|posix_spawnp?|spawn[vl]\w*|check_call|check_output)|subprocess\.\w+"
)
_SUBPROCESS_SHELLS = {("os", "system"), ("os", "popen"), ("torch", "load"), ("torch", "save")}


@functools.cache
def parsed(source: str) -> ast.Module:
    """The syntax tree. It is shared by all rules, which only read it."""
    return ast.parse(source)


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Every node of the syntax tree."""
    return list(ast.walk(parsed(source)))


def package_files() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def code_lines(source: str) -> int:
    """Lines that hold code: not blank, not a comment, not a docstring."""
    prose = {
        line
        for node in nodes(source)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - prose)


def python_files() -> list[Path]:
    """Every Python file of the project: the package, its tests and its scripts."""
    return sorted(path for folder in ("src", "tests", "scripts") for path in (ROOT / folder).rglob("*.py"))


def dotted(path: Path) -> str:
    """`src/pagerunner/memory/planner.py` -> `pagerunner.memory.planner`."""
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part(module: str) -> str:
    """The top-level part a module belongs to: `pagerunner.memory.planner` -> `memory`."""
    return ([*module.split("."), ""])[1]


def imported_modules(source: str, module: str) -> list[str]:
    """Every module that `source` imports anywhere: in functions and under TYPE_CHECKING too."""
    found: list[str] = []
    package = module.split(".")
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level], *([base] if base else [])])
            for alias in node.names:
                submodule = base == "pagerunner" and alias.name in LEVELS
                found.append(f"{base}.{alias.name}" if submodule else base)
    return found


def layer_faults(source: str, module: str) -> list[str]:
    """Imports of `module` that point sideways or up."""
    own = part(module)
    if own not in LEVELS:
        return [f"{module}: {own!r} has no layer; add it to LEVELS where it belongs"]
    faults = []
    for target_module in imported_modules(source, module):
        if target_module.split(".")[0] != "pagerunner":
            continue
        target = part(target_module)
        if target == own:
            continue
        if target not in LEVELS:
            faults.append(f"{module} imports {target_module}, which has no layer")
        elif own in FRONT and target in CLOSED_TO_FRONT:
            faults.append(f"{module} reaches past the engine's front ends into {target_module}")
        elif LEVELS[target] >= LEVELS[own] and (own, target) not in PEERS:
            faults.append(f"{module} (level {LEVELS[own]}) imports {target_module} (level {LEVELS[target]})")
    return faults


def torch_imports(source: str, module: str) -> list[str]:
    """Imports of torch, or of anything built on it, in a module that must not know it."""
    heavy = {"torch", "triton", "safetensors", "transformers"}
    return [f"{module} imports {name}" for name in imported_modules(source, module) if name.split(".")[0] in heavy]


def size_faults(source: str, name: str, tree: ast.Module | None = None) -> list[str]:
    """Files and functions over their limits; `tree` is what `parsed` has kept."""
    lines = source.count("\n") + (not source.endswith("\n"))
    faults = [f"{name} has {lines} lines, over {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    for node in _definitions(tree or ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                faults.append(f"{name}: {node.name} has {length} lines, over {MAX_FUNCTION_LINES}")
    return faults


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Statements at any depth; expressions, which are most nodes, hold none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield child
            yield from _definitions(child)


def docstring_faults(source: str, name: str) -> list[str]:
    """Public modules, classes, functions and methods without a docstring."""
    tree = parsed(source)
    faults = [] if ast.get_docstring(tree) else [f"{name} has no docstring"]
    return faults + [f"{name}: {where} has no docstring" for where in _undocumented(tree, "")]


def _undocumented(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or child.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator).split(".")[-1] for decorator in child.decorator_list}
        if ast.get_docstring(child) is None and not decorators & {"setter", "overload"}:
            yield prefix + child.name
        if isinstance(child, ast.ClassDef):
            yield from _undocumented(child, f"{prefix}{child.name}.")


def weight_faults(source: str, name: str) -> list[str]:
    """Reads of a tensor among another module's weights, past the form that they are stored in."""
    return [
        f"{name}:{node.lineno} reads {ast.unparse(node)}; ask the module that holds it"
        for node in nodes(source)
        if isinstance(node, ast.Attribute) and node.attr == "weights" and ast.unparse(node.value) != "self"
    ]


def all_faults(source: str, name: str) -> list[str]:
    """Names in a module's `__all__` that it doesn't bind, or lists twice."""
    bound: set[str] = set()
    listed: list[str] | None = None
    for node in nodes(source):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            bound |= set(names)
            if names == ["__all__"] and node.value is not None:
                listed = list(ast.literal_eval(node.value))
    faults = [f"{name}: __all__ lists {entry}, which isn't there" for entry in listed or [] if entry not in bound]
    return faults + [f"{name}: __all__ lists {e} twice" for e in sorted(set(listed or [])) if listed.count(e) > 1]


def unsafe_faults(source: str, name: str) -> list[str]:
    """Deserialisers that run code, evaluated strings, shells, remote code, and sockets open to the world."""
    faults = [f"{name} imports {m}" for m in imported_modules(source, name) if m.split(".")[0] in _UNSAFE_MODULES]
    for node in nodes(source):
        what = _unsafe_node(node)
        if what is not None:
            faults.append(f"{name}:{getattr(node, 'lineno', '?')} uses {what}")
    return faults


def _unsafe_node(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _UNSAFE_CALLS:
        return node.func.id
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and (node.value.id, node.attr) in _SUBPROCESS_SHELLS:
            return f"{node.value.id}.{node.attr}"
        if node.attr in _UNSAFE_ATTRIBUTES:
            return node.attr
    if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
        return node.arg
    if isinstance(node, ast.keyword) and node.arg == "shell" and not _is_false(node.value):
        return "shell=True"
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _open_address(node.value):
        return f"the address {node.value!r}"
    return None


def child_faults(source: str, name: str) -> list[str]:
    """Processes that a module starts itself, past the one module that names what their environment holds."""
    if name in _MAY_START_PROCESSES:
        return []
    faults = [f"{name} imports {m}" for m in imported_modules(source, name) if m.split(".")[0] == "multiprocessing"]
    return faults + [
        f"{name}:{node.lineno} calls {ast.unparse(node.func)}; pagerunner.children starts processes"
        for node in nodes(source)
        if isinstance(node, ast.Call) and _STARTS_A_PROCESS.fullmatch(ast.unparse(node.func))
    ]


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _open_address(text: str) -> bool:
    if text in ("0.0.0.0", "::", "[::]"):
        return True
    match = re.match(r"tcp://([^:/{]*|\[[^\]]*\]):", text)
    return match is not None and match[1] not in ("127.0.0.1", "localhost", "[::1]")


def loop_faults(source: str, name: str) -> list[str]:
    """Inner loops of kernels whose bounds are made of what an outer `for` carries from one time to the next.

    Triton 3.6 may take that for what it was before the outer loop; see `scripts/check_compiled.py`, which knows when. The rule knows the text of
    one function only, and refuses all of them: load or calculate such bounds anew. An outer `while` carries them rightly.
    """
    faults = []
    for function in nodes(source):
        if not isinstance(function, ast.FunctionDef) or not any(
            "jit" in ast.unparse(one) for one in function.decorator_list
        ):
            continue
        for outer in ast.walk(function):
            if not isinstance(outer, ast.For) or "static_range" in ast.unparse(outer.iter):
                continue
            made: dict[str, set[str]] = {}
            for node in ast.walk(outer):
                if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    for target in set[str]().union(*map(_names, targets)):
                        made.setdefault(target, set()).update(_names(node.value))
            bound = {arg.arg for arg in function.args.args}
            bound |= {
                node.id
                for node in ast.walk(function)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.lineno < outer.lineno
            }
            for inner in ast.walk(outer):
                if isinstance(inner, ast.For) and inner is not outer:
                    found, left = set[str](), [*_names(inner.iter)]
                    while left:
                        if (one := left.pop()) not in found:
                            found.add(one)
                            left += made.get(one, ())
                    faults += [
                        f"{name}.{function.name}: the loop in line {inner.lineno} reads {one}, which the one in line {outer.lineno} carries"
                        for one in sorted(found & set(made) & bound)
                    ]
    return faults


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def missing_paths(text: str) -> list[str]:
    """Backticked paths in a document that name no file of the project."""
    missing = []
    for name in sorted(set(re.findall(r"`([\w./{},*-]+)`", text))):
        looks_like_path = re.search(r"\.(py|md|svg|toml|txt)$", name) or (name.endswith("/") and len(name) > 1)
        if looks_like_path and not any(_exists(base, name) for base in (ROOT, PACKAGE, ROOT / "docs")):
            missing.append(name)
    return missing


def _exists(base: Path, name: str) -> bool:
    braces = re.fullmatch(r"(.*)\{([^}]*)\}(.*)", name)
    if braces:
        return all(_exists(base, braces[1] + middle + braces[3]) for middle in braces[2].split(","))
    return any(base.glob(name)) if "*" in name else (base / name).exists()


def anchors(text: str) -> set[str]:
    """What a link may name behind "#" in a document: its headings as GitHub writes them, and its `<a id="...">`."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE)
    slugs = [re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", head).lower()).replace(" ", "-") for head in headings]
    return {*slugs, *re.findall(r'<a id="([^"]+)">', text)}


def broken_links(path: Path, text: str) -> list[str]:
    """Links of the document at `path` to files that aren't there, or to headings that their file doesn't have."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if ":" in name:  # an address
            continue
        if name and not target.exists():
            broken.append(link)
        elif anchor and anchor not in anchors(text if not name else target.read_text(encoding="utf-8")):
            broken.append(link)
    return broken


def table_numbers(text: str) -> set[str]:
    """Numbers of three characters or more in the tables of a document."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return {number for row in rows for number in re.findall(r"\d[\d.,]*\d", row) if len(number) > 2}


def text_literals(source: str) -> Iterator[str]:
    """Strings of the code but docstrings; what a format fills in is "…"."""
    skipped = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    for node in nodes(source):
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(str(part) for part in parts)
    for node in nodes(source):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield re.sub(r"%[sdgr]|%\.\d+f", "…", node.value)


def unknown_messages(document: str, literals: Iterable[str]) -> list[str]:
    """Quotations ("> ..." lines) of a document that no literal holds; "…" stands for anything."""
    known = "\n".join(literals)
    quoted = [line[2:].strip() for line in document.splitlines() if line.startswith("> ")]
    patterns = {quote: r"[^\n]*?".join(map(re.escape, quote.strip("…").split("…"))) for quote in quoted}
    return [quote for quote, pattern in patterns.items() if not re.search(pattern, known)]
