"""autotp: an unmodified Transformer, made to run tensor-parallel."""

from autotp.api import parallelize, plan, verify
from autotp.cost.machine import Machine
from autotp.errors import (
    AutotpError,
    CaptureError,
    GroupError,
    PlanError,
    RuleError,
    UnknownOpError,
    VerifyError,
    WeightsError,
)
from autotp.loading import from_pretrained
from autotp.records.evidence import Evidence
from autotp.records.plan import Plan
from autotp.report import plan as _report
from autotp.runtime.model import ShardedModel

_ = _report  # imported for what it registers: print(plan) shows the report

__all__ = [
    "AutotpError",
    "CaptureError",
    "Evidence",
    "GroupError",
    "Machine",
    "Plan",
    "PlanError",
    "RuleError",
    "ShardedModel",
    "UnknownOpError",
    "VerifyError",
    "WeightsError",
    "from_pretrained",
    "parallelize",
    "plan",
    "verify",
]
