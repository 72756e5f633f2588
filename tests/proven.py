"""A model's plan, proven: captured once, planned, built on every rank, run beside the whole one."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from autotp.compiler import ModelCompiler
from autotp.options import read_request
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan
from autotp.records.trace import Trace
from autotp.runtime.group.process_group import Group
from autotp.runtime.model import ShardedModel
from autotp.verification import compare_ranks
from tests import zoo
from tests.models import build

__all__ = ["Captured", "Proof", "family", "of_zoo", "proven"]


@dataclass(frozen=True)
class Proof:
    """A plan, its ranks, and whether they equal the whole model."""

    plan: Plan
    ranks: list[ShardedModel]
    evidence: Evidence


class Captured:
    """One model under one set of options, for any number of tp."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any], **options: Any) -> None:
        """The capture of `model`; trained unless told otherwise."""
        self.model = model
        self.work = ModelCompiler(
            model, read_request(**{"example_inputs": inputs, "training": True} | options)
        )

    def plan(self, tp: int) -> Plan:
        """The plan alone."""
        return self.work.compile(tp, "tp").plan

    def proof(self, tp: int) -> Proof:
        """The plan with its ranks and the evidence about them; gradients too, where trained."""
        made = self.work.compile(tp, "tp")
        where = [Group("tp", tp, rank, torch.device("cpu")) for rank in range(tp)]
        ranks = [self.work.build(made, group) for group in where]
        evidence = compare_ranks(
            self.model,
            ranks,
            self.work.inputs,
            made.plan,
            Trace(made.rewritten.values),
            program=self.work.program,
            gradients=made.plan.training,
            seed=0,
            dtype=torch.float32,
        )
        return Proof(made.plan, ranks, evidence)

    def proven(self, tp: int) -> Plan:
        """The plan, whose ranks equal the whole model."""
        proof = self.proof(tp)

        assert proof.evidence.ok, (proof.evidence.first_divergence, proof.evidence.notes)
        return proof.plan


@cache
def family(name: str, *, training: bool = True, **sizes: int) -> Captured:
    """A model of `tests.models` in these sizes, captured once for all tests of a process."""
    return Captured(*build(name, **sizes), training=training)


@cache
def of_zoo(model_type: str, task: str = "causal-lm", **options: bool) -> Captured:
    """A model of `tests.zoo`, captured once for all tests of a process."""
    return Captured(*zoo.build(model_type, task), **options)


def proven(model: nn.Module, inputs: Mapping[str, Any], tp: int, **options: Any) -> Plan:
    """The plan, whose model equals the whole one, gradients included."""
    return Captured(model, inputs, **options).proven(tp)
