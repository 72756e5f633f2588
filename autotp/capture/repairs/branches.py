"""Guards for branches of the model's code on sizes that torch.export traces as 2 or more.

Torch assumes that a free size is at least 2, so `x.shape[0] == 1` is false without any guard, and
the graph is wrong at size 1. The conditions that the code evaluates are recorded with their
results; those whose result differs at a size of 1 become guards of our own.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to the frame of a condition, nor to the first name of a size

import dis
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from types import FrameType
from typing import Any, TypeAlias, cast

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils._sympy.printers import PythonPrinter

from autotp.capture.graph_facts import TORCH
from autotp.capture.program import Guard

# Any: sympy has no types.
Branch: TypeAlias = tuple[Any, bool]
"""A condition on sizes, with its result while tracing."""

_WRAPPERS = os.path.join(TORCH, "__init__.py")  # where `bool(size)` evaluates `size != 0`
_LAYERS = os.path.join(TORCH, "nn", "")  # layers of torch count as the model's code
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


@contextmanager
def record_branches() -> Generator[list[Branch]]:
    """Record the conditions on sizes on which the model's own code branches.

    Constraints: conditions that torch evaluates for itself (strides, broadcasting) do not count.
    """
    recorded: list[Branch] = []
    truth = torch.SymBool.__bool__

    def record(self: torch.SymBool) -> bool:
        condition, frame = self.node.expr, find_model_frame(sys._getframe(1))
        wanted = None if frame is None or self.node.has_hint() else _find_harmless_answer(frame)
        if wanted is not None:
            torch._check(self if wanted else torch.sym_not(self))
            return wanted
        answer = truth(self)
        if frame is not None:
            recorded.append((condition, answer))
        return answer

    torch.SymBool.__bool__ = record
    try:
        yield recorded
    finally:
        torch.SymBool.__bool__ = truth


def _find_harmless_answer(frame: FrameType) -> bool | None:
    """The value of the condition that `frame` evaluates that avoids a `raise`; None if both do, or
    neither.

    Example: True in `assert lengths.max().item() <= length`.
    """
    code = list(dis.get_instructions(frame.f_code))
    at = next(i for i, one in enumerate(code) if one.offset == frame.f_lasti)
    jump = code[at + (code[at].opname == "TO_BOOL")]
    if "POP_JUMP" not in jump.opname or not jump.opname.endswith(("_TRUE", "_FALSE")):
        return None
    target = next(i for i, one in enumerate(code) if one.offset == jump.argval)
    raises = {jump.opname.endswith("_TRUE"): _raises(code[target:])}
    raises[not jump.opname.endswith("_TRUE")] = _raises(code[code.index(jump) + 1 :])
    return None if raises[True] == raises[False] else raises[False]


def _raises(code: list[dis.Instruction]) -> bool:
    """Whether straight-line code leads to a `raise`."""
    for one in code:
        if one.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in one.opname or one.opname.startswith(("RETURN", "YIELD")):
            return False
    return False


def find_model_frame(frame: FrameType | None) -> FrameType | None:
    """The frame that evaluates a condition, if it is not in torch; torch's layers do not count."""
    while frame is not None and frame.f_code.co_filename == _WRAPPERS:
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return None if file.startswith(TORCH) and not file.startswith(_LAYERS) else frame


def build_semantic_guards(
    branches: list[Branch], exported: ExportedProgram, where: Mapping[str, str]
) -> Iterator[Guard]:
    """A guard for each condition whose value differs at a size of 1.

    - `where`: for each tensor input of `exported`, in its order, how guards write it.
    """
    sources = _spell_symbols(exported, list(where.values()))
    for condition, answer in dict.fromkeys([*branches, *_list_squeezes(exported)]):
        names = [str(s) for s in condition.free_symbols]
        if names and all(n in sources for n in names) and _changes_at_one(condition, answer):
            text = PythonPrinter().doprint(condition)
            code = _SYMBOL.sub(lambda m: sources.get(m[0], m[0]), text)
            yield Guard(f"({code})" if answer else f"not ({code})")


def _list_squeezes(exported: ExportedProgram) -> Iterator[Branch]:
    """The conditions that dims which a squeeze would drop do not have size 1."""
    squeeze = torch.ops.aten.squeeze
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if getattr(node.target, "overloadpacket", None) is squeeze:
                shape = node.args[0].meta["val"].shape
                dims = node.args[1] if len(node.args) > 1 else list(range(len(shape)))
                sizes = [shape[d] for d in (dims if isinstance(dims, list | tuple) else [dims])]
                symbolic = (cast("Any", s == 1) for s in sizes if isinstance(s, torch.SymInt))
                yield from ((is_one.node.expr, False) for is_one in symbolic)


def _spell_symbols(exported: ExportedProgram, where: list[str]) -> dict[str, str]:
    """How guards write each symbol: as a size of the first input that has it."""
    names = set(exported.graph_signature.user_inputs)
    inputs = [n for n in exported.graph.nodes if n.op == "placeholder" and n.name in names]
    tensors = [n.meta["val"] for n in inputs if isinstance(n.meta["val"], torch.Tensor)]
    sources: dict[str, str] = {}
    for spelled, tensor in zip(where, tensors, strict=True):
        for dim, size in enumerate(tensor.shape):
            if isinstance(size, torch.SymInt):
                for name in (size.node._expr, size.node.expr):  # before and after torch unified it
                    sources.setdefault(str(name), f"{spelled}.size()[{dim}]")
    return sources


def _changes_at_one(condition: Any, answer: bool) -> bool:
    """Whether the condition has another value where some of its sizes are 1."""
    symbols = sorted(condition.free_symbols, key=str)
    ones = [of for n in range(1, len(symbols) + 1) for of in combinations(symbols, n)]
    return any(condition.subs(dict.fromkeys(of, 1)) != answer for of in ones)
