"""What every good plan has: its pairs in equal shards, and nearly all bytes in pairs."""

from autotp.records.plan import Plan

__all__ = ["check_sharding"]


def check_sharding(plan: Plan, tp: int) -> None:
    """Each rank has its share of what can be sharded, which is most of the model."""
    paired = list(dict.fromkeys(p for pair in plan.pairs for p in (*pair.openers, *pair.closers)))

    assert plan.collectives
    assert plan.cost["home_bytes"] == 0
    assert most_held(plan, paired) <= bytes_of(plan, paired) * (1 / tp + 0.05)
    assert bytes_of(plan, paired) > 0.8 * bytes_of(plan, list(plan.parameters))


def bytes_of(plan: Plan, names: list[str]) -> int:
    return sum(plan.parameters[name].bytes for name in names)


def most_held(plan: Plan, names: list[str]) -> int:
    """The bytes that the fullest rank has of the parameters named."""
    ranks = zip(*([s.bytes for s in plan.parameters[name].shards] for name in names), strict=True)
    return max(map(sum, ranks))
