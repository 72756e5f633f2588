"""Random legal plans: every node takes any strategy that its rule allows, not the cheapest.

The optimum of a model meets a few rules in a few placements. A random plan is the same placement
problem, the whole table of conversions open, whose costs are drawn by a seed: solved exactly, it
sends every value through placements that no sensible plan would choose. Outputs and gradients must
equal the whole model's all the same. Computed in float64, where rounding stays near 1e-13: what
differs by more is a fault in a rule, in the rewriter or in a local form.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from autotp.compiler import CompiledVariant, ModelCompiler
from autotp.options import read_request
from autotp.planner.formulate import PlacementProblem
from autotp.records.evidence import Evidence
from autotp.records.trace import Trace
from autotp.runtime.group.process_group import Group
from autotp.solver.problem import Edge, Problem, Variable
from autotp.solver.solve import solve
from autotp.verification import compare_ranks
from tests.models import FAMILIES, HAND, HandShape, build

__all__ = [
    "Case",
    "Outcome",
    "Prepared",
    "analysed",
    "cases",
    "made",
    "outcome",
    "outcomes",
    "posed",
    "prepared",
    "random_problem",
]

LARGEST = 1000
"""Costs are drawn below this."""
LAYER_KEYS = ("layers", "num_layers", "num_hidden_layers", "num_decoder_layers", "n_layer")
HIDDEN, HEADS, KV_HEADS, FFN, WORDS = 48, 6, 3, 96, 513
"""Sizes that 3 divides, by every name they have."""
THIRDS = {
    **dict.fromkeys(("hidden", "hidden_size", "word_embed_proj_dim", "n_embd", "d_model"), HIDDEN),
    **dict.fromkeys(("heads", "num_attention_heads", "num_heads", "n_head"), HEADS),
    **dict.fromkeys(("ffn", "intermediate_size", "ffn_dim", "d_ff"), FFN),
    **dict.fromkeys(("words", "vocab_size"), WORDS),
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": 3,
}
SIZES = (2, 4, 3)
LEVELS = ("forbidden", "time_ps")


@dataclass(frozen=True)
class Case:
    """One random plan: the model's name in tests.models, and what draws the plan."""

    model: str
    tp: int
    training: bool
    seed: int

    def __str__(self) -> str:
        """The code that runs it again."""
        return f"Case({self.model!r}, tp={self.tp}, training={self.training}, seed={self.seed})"


@dataclass(frozen=True)
class Outcome:
    """What the proof of one random plan found, or why there is none.

    - `split`: the part of the nodes that run on a split axis; `kinds`: conversions written, by op.
    """

    case: Case
    evidence: Evidence | None
    split: float = 0.0
    kinds: Mapping[str, int] | None = None
    failure: str = ""
    own_loss: bool = False

    @property
    def ok(self) -> bool:
        """Whether the ranks equal the whole model and ran what the plan counts.

        The backward pass of a model's own loss leaves out what only its other outputs ask for.
        """
        found = self.evidence
        if found is None or found.first_divergence is not None:
            return False
        unused = Counter(found.collectives_predicted) - Counter(found.collectives_seen)
        fewer = self.own_loss and Counter(found.collectives_seen) <= Counter(
            found.collectives_predicted
        )
        return found.ok or (fewer and all(name.startswith("backward") for name in unused))

    @property
    def worst(self) -> float:
        """The largest relative difference of outputs and gradients."""
        if self.evidence is None:
            return float("inf")
        return max([self.evidence.max_rel_error, *self.evidence.gradients.values()])

    def __str__(self) -> str:
        """What is wrong, and how to see it again."""
        found = self.evidence
        reason = self.failure if found is None else f"{found.first_divergence} {found.notes}"
        return f"{self.case}: {reason}"


@dataclass(frozen=True)
class Prepared:
    """A model captured and analysed, and its placement problem: all that plans of one tp share."""

    model: nn.Module
    inputs: Mapping[str, Any]
    work: ModelCompiler
    posed: PlacementProblem


@cache
def analysed(name: str, *, thirds: bool = False, layers: int = 2) -> ModelCompiler:
    """The model called `name` in tests.models, captured and analysed once.

    - `thirds`: in sizes that 3 divides, and, where it can, with eager attention and labels.
    """
    known = _sizes(name)
    sizes = {key: layers for key in LAYER_KEYS if key in known}
    sizes |= {key: THIRDS[key] for key in THIRDS if thirds and key in known}
    model, inputs = build(name, attn="eager" if thirds else "sdpa", **sizes)
    if thirds and name != HAND:
        inputs["labels"] = inputs.get("decoder_input_ids", inputs["input_ids"])
        inputs.pop("decoder_input_ids", None)
    return ModelCompiler(model, read_request(example_inputs=inputs, training=False))


def _sizes(name: str) -> Set[str]:
    """The fields of its configuration that a model of tests.models sets."""
    if name == HAND:
        return {field.name for field in fields(HandShape)}
    return {*FAMILIES[name][2], "vocab_size"}


def prepared(work: ModelCompiler, tp: int, *, training: bool) -> Prepared:
    """The placement problem of an analysed model, every conversion of the table open."""
    work = copy.copy(work)
    work.training = training
    return Prepared(work.model, work.inputs, work, work.formulate(tp, everything=True))


def random_problem(problem: Problem, seed: int) -> Problem:
    """`problem` with the same legal choices, at costs drawn for every choice of every variable.

    Each seed also favours some kinds of choices, or partial values would be rare.
    """
    rng = np.random.default_rng(seed)
    favour = dict(zip("0123456789prsPRS", rng.choice((1, 2, 5), 16).tolist(), strict=True))
    favour["G"] = favour["S"]
    edges: dict[int, NDArray[np.int64]] = {}

    def kept(edge: Edge) -> Edge:
        shared = edges.setdefault(id(edge.costs), _two_levels(edge.costs, np.int64(0)))
        return replace(edge, costs=shared)

    def drawn(variable: Variable) -> Variable:
        weights = [favour[label[0]] for label in variable.domain]
        costs = rng.integers(0, LARGEST, len(weights)) * np.array(weights)
        return replace(variable, costs=_two_levels(variable.costs, costs))

    return Problem(LEVELS, tuple(map(drawn, problem.variables)), tuple(map(kept, problem.edges)))


def _two_levels(costs: NDArray[np.int64], time: NDArray[np.int64] | np.int64) -> NDArray[np.int64]:
    return np.stack([costs[0], np.broadcast_to(time, costs[0].shape)])


def made(prepared: Prepared, tp: int, seed: int) -> CompiledVariant:
    """The random plan that `seed` draws, rewritten and checked."""
    problem = prepared.posed.problem
    found = solve(random_problem(problem, seed))
    cost = problem.compute_cost(found.choice)
    solution = replace(found, cost=cost, bound=cost)
    return prepared.work.lower(prepared.posed, solution, tp, "tp")


def outcome(prepared: Prepared, case: Case) -> Outcome:
    """What the proof of one random plan finds; an error on the way is an outcome too."""
    torch.manual_seed(case.seed)
    try:
        one = made(prepared, case.tp, case.seed)
        evidence = proved(prepared, one, case)
    except Exception as error:  # noqa: BLE001  any fault is a finding, told with its seed
        return Outcome(case, None, failure=f"{type(error).__name__}: {error}")
    own = "labels" in prepared.inputs
    return Outcome(case, evidence, _split_part(one), _conversions(one), own_loss=own)


def proved(prepared: Prepared, one: CompiledVariant, case: Case) -> Evidence:
    """The evidence of a rewritten plan, in float64."""
    where = [Group("tp", case.tp, rank, torch.device("cpu")) for rank in range(case.tp)]
    return compare_ranks(
        prepared.model,
        [prepared.work.build(one, group) for group in where],
        prepared.inputs,
        one.plan,
        Trace(one.rewritten.values),
        program=prepared.work.program,
        gradients=case.training,
        seed=case.seed,
        dtype=torch.float64,
    )


def _split_part(one: CompiledVariant) -> float:
    strategies = one.decision.strategies.values()
    return sum(bool(s.partition.parts) for s in strategies) / len(strategies)


def _conversions(one: CompiledVariant) -> Mapping[str, int]:
    names = (str(node.target) for node in one.rewritten.graph.nodes if node.op == "call_function")
    return Counter(n.split(".")[1] for n in names if n.startswith("autotp."))


def cases(model: str, count: int, seed: int) -> list[Case]:
    """`count` cases of `model`, by turns over tp 2, 4 and 3, with gradients and without."""
    turns = [(tp, training) for training in (True, False) for tp in SIZES]
    return [Case(model, *turns[k % len(turns)], seed + k) for k in range(count)]


def outcomes(cases: Iterable[Case], layers: int = 2) -> Iterator[Outcome]:
    """What the proof of each case finds; problems are posed once.

    Constraints: tp 3 takes the model in sizes that 3 divides, with eager attention and labels.
    """
    for case in cases:
        yield outcome(posed(case.model, case.tp, case.training, layers), case)


@cache
def posed(model: str, tp: int, training: bool, layers: int) -> Prepared:
    """The placement problem of a model at one tp."""
    return prepared(analysed(model, thirds=tp == 3, layers=layers), tp, training=training)
