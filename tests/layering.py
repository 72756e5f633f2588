"""The laws of the house, checked on the syntax tree of every file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

# nouns with torch in them; they may know each other
NOUNS = {
    "rulebook",
    "program",
    "sizes",
    "sums",
    "analysis",
    "cache",
    "conditions",
    "layouts",
    "offers",
    "options",
    "terms",
    "whole",
}
BELOW = {"errors", "core"}
# what each part may import of autotp
ALLOWED = {
    "errors": set[str](),
    "core": BELOW,
    **dict.fromkeys(NOUNS, BELOW | NOUNS),
    "constraints": BELOW | NOUNS,
    "further": BELOW | NOUNS | {"constraints", "run"},
    "dump": BELOW | NOUNS,
    "models": BELOW,
    "random_weights": BELOW,
    "arguments": BELOW | {"models"},
    "passes": BELOW | NOUNS | {"passes"},
    "run": BELOW | NOUNS | {"run"},
    "show": BELOW | NOUNS | {"show"},
    "simulate": BELOW | NOUNS | {"run", "simulate"},
    "checkpoint": BELOW | NOUNS | {"models", "run", "checkpoint"},
    "proof": BELOW | NOUNS | {"run", "simulate", "proof"},
    "laws": BELOW | NOUNS | {"passes", "run", "laws"},
}
ALLOWED["calls"] = BELOW | NOUNS
ALLOWED["work"] = {*ALLOWED} - {"arguments"}
ALLOWED["pipeline"] = {*ALLOWED} - {"arguments"}
ALLOWED["loading"] = {*ALLOWED} - {"arguments"}
ALLOWED["offline"] = {*ALLOWED} - {"arguments"}
ALLOWED["generation"] = {*ALLOWED} - {"arguments", "pipeline"}
ALLOWED["cli"] = {*ALLOWED}
ALLOWED["__init__"] = {*ALLOWED}
ALLOWED["__main__"] = {"cli"}

# parts of a stage whose file does not begin with the stage's name
PARTS = {
    "clean": "capture",
    "functional": "capture",
    "derive": "analyse",
    "discover": "analyse",
    "emit": "rewrite",
    "outline": "rewrite",
}
# what core may not import from outside
NOT_IN_CORE = {"torch", "transformers", "rich", "scipy"}
# optional extras, and what differs between torch versions
LAZY = {
    ("models.py", "transformers"),
    ("generation.py", "transformers"),
    ("checkpoint/outgoing.py", "huggingface_hub"),
}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
BANNED_CLASSES = re.compile(r"(Manager|Context|Helper|Utils?)$")
FAMILIES = re.compile(
    r"(?<![a-z])(llama|mistral|mixtral|qwen|gemma|gpt_?2|gpt_?neox|gpt_?j|bloom|opt_125|phi_?[0-9]"
    r"|roberta|bert|t5|falcon|deepseek|olmo|cohere|stablelm|starcoder|mamba|whisper|bart|pegasus"
    r"|marian|pythia|granite|megatron_?lm)(?![a-z])",
    re.IGNORECASE,
)
PRINTING = ("show", "cli")


def violations(root: Path) -> list[str]:
    """What the tree at `root` (with autotp/ and rules/) does against the laws, one line each."""
    package = root / "autotp"
    found = [
        f"{path.relative_to(root)}:{line}: {reason}"
        for path in sorted(package.rglob("*.py"))
        for line, reason in _of_file(path, path.relative_to(package))
    ]
    return found + [
        f"{path.relative_to(root)}: names a model family: {match.group()}"
        for path in sorted((root / "rules").rglob("*.toml"))
        for match in FAMILIES.finditer(_without_prose(path.read_text(encoding="utf-8")))
    ]


def _of_file(path: Path, relative: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    part = relative.parts[0].removesuffix(".py")
    if part not in ALLOWED:
        yield 1, f"{part} has no place in the layers"
        return
    if relative.stem in BANNED_NAMES:
        yield 1, f"a file called {relative.stem}"
    if len(text.splitlines()) > 400:
        yield 1, f"{len(text.splitlines())} lines, more than 400"
    yield from _imports(tree, part, relative)
    yield from _nested_imports(tree, relative)
    yield from _names(tree)
    if part not in PRINTING:
        yield from _prints(tree)


def _imports(tree: ast.AST, part: str, relative: Path) -> Iterator[tuple[int, str]]:
    for line, name in _imported(tree):
        top, _, rest = name.partition(".")
        if top == "autotp":
            target = rest.split(".")[0] or "__init__"
            if target not in ALLOWED[part]:
                yield line, f"{part} imports {name}"
            if part == target == "passes" and (reason := _between(relative.stem, rest)):
                yield line, reason
        elif part == "core" and top in NOT_IN_CORE:
            yield line, f"core imports {name}"


def _between(importer: str, imported: str) -> str:
    """Why one stage may not import another; empty when they are parts of one."""
    mine = _stage(importer)
    theirs = _stage(imported.removeprefix("passes").lstrip(".").split(".")[0])
    return f"stage {mine} imports stage {theirs}" if mine and theirs and mine != theirs else ""


def _stage(name: str) -> str:
    first = name.partition("_")[0]
    return PARTS.get(first, first)


def _imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from autotp import rulebook` imports autotp.oprules.rulebook
            inner = node.names if module in ("autotp", "autotp.passes") else []
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in inner)
            if not inner:
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
