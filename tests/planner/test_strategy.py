"""Strategies follow from a rule: which there are, and what each operand and result gets."""

from dataclasses import replace

import pytest

from autotp.algebra.axis import Dim, Forest
from autotp.algebra.partition import Offers, Part, Partition
from autotp.algebra.placement import PARTIAL, REPLICATED, SHARED, Placement, split
from autotp.algebra.size import Size
from autotp.oprules.rule import Factor, NodeRule
from autotp.planner.strategy import Facts, Strategy, derive_strategies

TOKENS, WIDTH, OUT = 6, 12, 18


class Linear:
    """The rule of `x (tokens, width)`, `weight (out, width)`, `bias (out)` -> `(tokens, out)`."""

    def __init__(self, out: int = OUT, *, data: bool = False) -> None:
        self.forest = Forest()
        self.tokens = self.forest.add_dim(Size(TOKENS), data=data)
        self.width = self.forest.add_dim(Size(WIDTH))
        self.out = self.forest.add_dim(Size(out))
        self.rule = NodeRule(
            factors=(
                Factor("pass", self.tokens, ((0, 0), (~0, 0))),
                Factor("reduce", self.width, ((0, 1), (1, 1)), "sum"),
                Factor("pass", self.out, ((1, 0), (2, 0), (~0, 1))),
            ),
            results=((self.tokens, self.out),),
            linear=(frozenset({0, 2}), frozenset({1, 2})),
            bias=frozenset({2}),
        )
        self.facts = Facts(
            operands=((self.tokens, self.width), (self.out, self.width), (self.out,)),
            differentiable=frozenset({0, 1, 2}),
            constant=frozenset(),
            floating=True,
            flows=True,
        )

    def all(self, tp: int = 2, *, training: bool = True) -> dict[str, Strategy]:
        """The strategies by label."""
        found = derive_strategies(self.rule, self.facts, self.forest, tp, training=training)
        return {s.label: s for s in found}


def name(dim: Dim) -> str:
    return dim[0].name


def test_a_linear_has_these_strategies_in_this_order() -> None:
    op = Linear()
    axes = [f"{k}:{name(d)}" for k, d in enumerate((op.tokens, op.width, op.out))]

    assert ["replicated", *axes, "partial:0,2", "partial:1,2", "shared"] == list(op.all())
    assert ["replicated", *axes, "partial:0,2", "partial:1,2"] == list(op.all(training=False))


def test_an_output_factor_cuts_the_weight_by_columns_and_shares_the_input() -> None:
    op = Linear()
    chosen = op.all()[f"2:{name(op.out)}"]
    cut = name(op.out)

    assert (SHARED, split(0, cut), split(0, cut)) == chosen.operands
    assert (split(1, cut),) == chosen.results


def test_a_contracted_factor_leaves_a_partial_sum_and_a_partial_bias() -> None:
    op = Linear()
    chosen = op.all()[f"1:{name(op.width)}"]
    cut = name(op.width)

    assert (split(1, cut), split(1, cut), PARTIAL) == chosen.operands
    assert (PARTIAL,) == chosen.results


def test_without_gradients_nothing_is_shared() -> None:
    op = Linear()
    chosen = op.all(training=False)[f"2:{name(op.out)}"]

    assert REPLICATED == chosen.operands[0]


def test_partial_sums_pass_where_the_op_is_linear() -> None:
    chosen = Linear().all()["partial:0,2"]

    assert (PARTIAL, SHARED, PARTIAL) == chosen.operands
    assert (PARTIAL,) == chosen.results


def test_a_partial_set_with_a_constant_is_refused() -> None:
    op = Linear()
    op.facts = replace(op.facts, constant=frozenset({2}), differentiable=frozenset({0, 1}))

    assert {"partial:0,2", "partial:1,2"}.isdisjoint(op.all())


def test_shared_gradients_pass_only_where_gradients_flow() -> None:
    op = Linear()
    op.facts = replace(op.facts, flows=False)

    # none comes back: what lies between readers that split has a whole result all the same
    assert (REPLICATED,) == op.all()["shared"].results


def test_integers_are_never_partial() -> None:
    op = Linear()
    op.facts = replace(op.facts, floating=False)

    assert ["replicated", f"0:{name(op.tokens)}", f"2:{name(op.out)}", "shared"] == list(op.all())


def test_an_operand_without_gradient_is_not_shared() -> None:
    op = Linear()
    op.facts = replace(op.facts, differentiable=frozenset({1, 2}))

    assert REPLICATED == op.all()[f"2:{name(op.out)}"].operands[0]


@pytest.mark.parametrize(("out", "tp"), [(5, 2), (18, 4), (7, 3)])
def test_an_axis_that_the_group_does_not_divide_stays_whole(out: int, tp: int) -> None:
    op = Linear(out)

    assert f"2:{name(op.out)}" not in op.all(tp)


def test_a_size_of_the_data_is_never_cut() -> None:
    op = Linear(data=True)

    assert f"0:{name(op.tokens)}" not in op.all()


def test_a_symbolic_size_is_never_cut() -> None:
    op = Linear()
    op.out[0].size = Size(18, ("s0",))

    assert f"2:{name(op.out)}" not in op.all()


def test_a_whole_factor_is_never_cut() -> None:
    op = Linear()
    factors = tuple(replace(f, kind="unshardable") for f in op.rule.factors)
    op.rule = replace(op.rule, factors=factors, linear=())

    assert ["replicated", "shared"] == list(op.all())


def test_one_rank_or_no_rule_leaves_one_strategy() -> None:
    op = Linear()

    assert ["replicated"] == list(op.all(tp=1))
    op.rule = replace(op.rule, ruled=False)
    assert ["replicated"] == list(op.all())


def test_what_lacks_the_axis_in_a_fused_dim_is_copied_and_its_gradient_partial() -> None:
    forest = Forest()
    heads, size = forest.add_dim(Size(6)), forest.add_dim(Size(2))
    piece = forest.add_dim(Size(4))
    fused = (forest.make_sum([heads + size, piece]),)
    rule = NodeRule((Factor("pass", fused, ((0, 0), (~0, 0), (~1, 0))),), ((fused,), (piece,)))
    facts = Facts(((fused,),), frozenset({0}), frozenset(), floating=True, flows=True)
    wanted = f"0:{heads[0].name}"

    def found(*, training: bool) -> Strategy:
        made = derive_strategies(rule, facts, forest, 2, training=training)
        return {s.label: s for s in made}[wanted]

    cut = Partition((Part(heads[0].name),))
    assert (Placement("S", 0, cut), REPLICATED) == found(training=False).results
    assert (Placement("S~", 0, cut), SHARED) == found(training=True).results


def test_uneven_parts_need_a_unit_for_every_rank_and_an_offer() -> None:
    op = Linear(out=5)
    offers = Offers(frozenset({name(op.out)}))

    def cut(tp: int, offers: Offers) -> bool:
        made = derive_strategies(op.rule, op.facts, op.forest, tp, training=True, offers=offers)
        return any(s.partition.axes == (name(op.out),) for s in made)

    assert cut(4, offers)
    assert not cut(6, offers)
    assert not cut(4, Offers())


def test_a_factored_group_copies_what_has_one_of_its_axes() -> None:
    """2 key-value heads over 4 ranks: q, and the product of both, are cut in two axes."""
    forest = Forest()
    kv, group, size = forest.add_dim(Size(2)), forest.add_dim(Size(4)), forest.add_dim(Size(3))
    rule = NodeRule(
        (
            Factor("pass", kv, ((0, 0), (1, 0), (~0, 0))),
            Factor("pass", group, ((0, 1), (~0, 1))),
            Factor("reduce", size, ((0, 2), (1, 1)), "sum"),
        ),
        ((kv, group),),
    )
    dims = ((kv, group, size), (kv, size))
    facts = Facts(dims, frozenset({0, 1}), frozenset(), floating=True, flows=True)
    both = Partition((Part(name(kv), 2, 2), Part(name(group), 2, 1)))
    offers = Offers(joint=(both,))
    made = {
        s.partition: s
        for s in derive_strategies(rule, facts, forest, 4, training=True, offers=offers)
    }

    copied = both.among({name(kv)})
    assert (Placement("SS", 0, both), Placement("S~", 0, copied)) == made[both].operands
    assert (Placement("SS", 0, both),) == made[both].results


def test_an_axis_within_a_product_names_its_own_axis() -> None:
    forest = Forest()
    heads, size = forest.add_dim(Size(6)), forest.add_dim(Size(2))
    merged = heads + size
    rule = NodeRule((Factor("pass", merged, ((0, 0), (~0, 0))),), ((merged,),))
    facts = Facts(((merged,),), frozenset({0}), frozenset(), floating=True, flows=True)
    made = derive_strategies(rule, facts, forest, 2, training=True)
    found = {s.partition.axes: s.results for s in made if s.partition.parts}

    assert {(a.name,): (split(0, a.name),) for a in (heads[0], size[0])} == found


def test_placements_are_sorted_by_their_notation() -> None:
    """The order of a domain, and so every tie, follows the text of an axis: a10 before a2."""
    factored = Placement("S", 0, Partition((Part("a10", 2, 2),)))
    wanted = [REPLICATED, split(0, "a10"), factored, split(0, "a2"), split(1, "a1")]
    shuffled = [wanted[k] for k in (3, 1, 4, 0, 2)]

    assert wanted == sorted(shuffled)
