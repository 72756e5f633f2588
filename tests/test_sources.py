"""What no source of the package may do: compare versions, read sizes by name.

C numbers are those of faults that users of tensor-parallel tools reported.
"""

import ast
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parents[1] / "autotp").rglob("*.py"))


def names_in(path: Path) -> set[str]:
    """The names, attributes and texts in a file, docstrings and comments apart."""
    tree = ast.parse(path.read_text())
    said = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    found |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    texts = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in said)
    return found | {n.value for n in texts if isinstance(n.value, str)}


@pytest.mark.slow
def test_no_version_is_compared() -> None:
    """What is there is tried; no number decides. A message may name a version (C103)."""
    words = {"version_info", "TorchVersion", "packaging", "parse_version"}

    assert len(SOURCES) > 50
    assert {} == {p.name: names_in(p) & words for p in SOURCES if names_in(p) & words}
    assert set() == {p.name for p in SOURCES if compares(p, "__version__")}


def compares(path: Path, word: str) -> bool:
    """Whether an attribute called `word` stands in a comparison."""
    found = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Compare))
    parts = (part for compared in found for part in ast.walk(compared))
    return any(isinstance(part, ast.Attribute) and word == part.attr for part in parts)


@pytest.mark.slow
def test_attributes_that_a_library_removed_are_not_asked_for() -> None:
    """Numbers of heads, sizes of heads: all of that is read from the graph (C105)."""
    words = {f"{kind}{what}" for kind in ("num_", "n_") for what in ("heads", "head", "kv_heads")}
    words |= {"num_attention_heads", "num_key_value_heads", "head_dim", "num_key_value_groups"}
    words |= {"hidden_size", "intermediate_size", "n_embd", "d_model", "tie_word_embeddings"}

    assert {} == {p.name: names_in(p) & words for p in SOURCES if names_in(p) & words}
