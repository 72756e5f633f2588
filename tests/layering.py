"""The laws of the house, checked on the syntax tree of every file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# rooms from the top down; those of one line do not know each other
ROOMS = [
    "__main__",
    "__init__ cli",
    "loading",
    "api",
    "compiler",
    "verification",
    "lower checkpoint",
    "planner report",
    "options",
    "runtime oprules",
    "capture cost",
    "records solver",
    "algebra",
    "model_source dtypes stage_check",
    "errors",
]
# what the package has at most: raise it by what you add, and say why; lower it by what you remove
LINES = 28_050

# what the rooms of pure arithmetic and plain data do not import
PURE = {"algebra", "records", "solver", "errors"}
NOT_PURE = {"torch", "transformers", "rich"}
# optional extras, and what differs between versions of torch
LAZY = {
    ("model_source.py", "transformers"),
    ("cli/generate.py", "transformers"),
    ("checkpoint/save_map.py", "huggingface_hub"),
}
LARGEST_FOLDER = 15
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
BANNED_CLASSES = re.compile(r"(Manager|Helper|Utils?)$|^_?Context$")
FAMILIES = re.compile(
    r"(?<![a-z])(llama|mistral|mixtral|qwen|gemma|gpt_?2|gpt_?neox|gpt_?j|bloom|opt_125|phi_?[0-9]"
    r"|roberta|bert|t5|falcon|deepseek|olmo|cohere|stablelm|starcoder|mamba|whisper|bart|pegasus"
    r"|marian|pythia|granite|megatron_?lm)(?![a-z])",
    re.IGNORECASE,
)
PRINTING = ("report", "cli")
LEVEL = {room: level for level, line in enumerate(ROOMS) for room in line.split()}


def violations(root: Path) -> list[str]:
    """What the tree at `root` (with autotp/ and rules/) does against the laws, one line each."""
    package = root / "autotp"
    paths = sorted(package.rglob("*.py"))
    found = [
        f"{path.relative_to(root)}:{line}: {reason}"
        for path in paths
        for line, reason in _of_file(path, path.relative_to(package))
    ]
    found += [
        f"{folder.relative_to(root)}: {count} files, more than {LARGEST_FOLDER}"
        for folder in sorted({path.parent for path in paths})
        if (count := len(_modules(folder))) > LARGEST_FOLDER
    ]
    total = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    if total > LINES:
        found.append(f"autotp: {total} lines, more than {LINES}")
    return found + [
        f"{path.relative_to(root)}: names a model family: {match.group()}"
        for path in sorted((root / "rules").rglob("*.toml"))
        for match in FAMILIES.finditer(_without_prose(path.read_text(encoding="utf-8")))
    ]


def _modules(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.stem not in ("__init__", "__main__")]


def _of_file(path: Path, relative: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    room = relative.parts[0].removesuffix(".py")
    if room not in LEVEL:
        yield 1, f"{room} is not among the rooms"
        return
    if relative.stem in BANNED_NAMES:
        yield 1, f"a file called {relative.stem}"
    if relative.stem == "__init__" and not ast.get_docstring(tree):
        yield 1, "a package without a sentence that says what it is for"
    yield from _imports(tree, room)
    yield from _nested_imports(tree, relative)
    yield from _names(tree)
    if room not in PRINTING:
        yield from _prints(tree)


def _imports(tree: ast.AST, room: str) -> Iterator[tuple[int, str]]:
    for line, name in _imported(tree):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0] or "__init__"
        if top == "autotp" and target != room and LEVEL.get(target, 0) <= LEVEL[room]:
            yield line, f"{room} imports {name}, which is not below it"
        elif room in PURE and top in NOT_PURE:
            yield line, f"{room} imports {name}"


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if module == "autotp":  # `from autotp import api` imports autotp.api
                yield from ((node.lineno, f"autotp.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def _nested_imports(tree: ast.AST, relative: Path) -> Iterator[tuple[int, str]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for line, name in _imported(function):
            yield line, f"{function.name} imports {name} inside a function"
        for node in ast.walk(function):
            name = _dynamic(node)
            if name and (relative.as_posix(), name) not in LAZY:
                yield node.lineno, f"{function.name} imports {name} when called"


def _dynamic(node: ast.AST) -> str:
    """The module that a call of importlib.import_module names outright; empty if none."""
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("import_module"):
        return ""
    argument = node.args[0]
    return str(argument.value) if isinstance(argument, ast.Constant) else ""


def _names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    prose = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and BANNED_CLASSES.search(node.name):
            yield node.lineno, f"a class called {node.name}"
        for word in [] if id(node) in prose else _words(node):
            if match := FAMILIES.search(word):
                yield getattr(node, "lineno", 0), f"names a model family: {match.group()}"


def _words(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Constant(value=str(text)):
            return [text]
        case _:
            return []


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Strings that stand alone: prose, where a family may serve as an example."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _prints(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="print" | "pprint" as name)):
                yield node.lineno, f"calls {name}"
            case _:
                pass


def _without_prose(toml: str) -> str:
    """The rules alone: no comments, notes or sources, where a family may serve as an example."""
    lines = (line.partition("#")[0] for line in toml.splitlines())
    return "\n".join(
        line for line in lines if not re.match(r"\s*(note|source|description)\b", line)
    )
