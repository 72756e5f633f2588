"""The exceptions that autotp raises on purpose.

    AutotpError
    ├── CaptureError      the model cannot be turned into one graph
    ├── RuleError         a row of rules/ is malformed or contradicts the op it names
    ├── UnknownOpError    an op has no rule, in strict mode
    ├── PlanError         the requested plan is impossible, or does not fit model, group or machine
    ├── WeightsError      a parameter's values are missing or do not fit
    ├── GroupError        a rank is gone or late, or ranks are called with different inputs
    └── VerifyError       the sharded model differs from the unsharded one, or a graph is ill-typed

A message has three parts: where (node, module path, the model's source line), what (both sides,
with numbers), and what to do.
"""


class AutotpError(Exception):
    """Any error that autotp raises on purpose."""


class CaptureError(AutotpError):
    """The model cannot be captured as one graph, or is called in a way that its graphs do not
    cover.
    """


class RuleError(AutotpError):
    """A row of rules/ is malformed, or contradicts the op it describes."""


class UnknownOpError(AutotpError):
    """An op has no rule, and strict mode forbids replicating it on every rank."""


class PlanError(AutotpError):
    """The requested plan is impossible, or the plan does not fit model, group or machine."""


class WeightsError(AutotpError):
    """A parameter's values are missing, or their shape does not fit the plan."""


class GroupError(AutotpError):
    """A rank of the group is gone or late, or the ranks are not called with the same inputs."""


class VerifyError(AutotpError):
    """The sharded model differs from the unsharded one, or a rewritten graph is ill-typed."""
