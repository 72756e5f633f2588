"""The rulebook: what is read, and one clear message for each way in which a row can be wrong."""

import re
import tomllib
from pathlib import Path

import pytest

from autotp.errors import RuleError
from autotp.lower.local_ops import FORMS
from autotp.oprules.derive.derive import RULES
from autotp.oprules.row_keys import ROW_KEYS
from autotp.oprules.rulebook import Rulebook, find_rules_root, load_rulebook

ROW = """
[[row]]
ops = ["aten.linear.default"]
rule = "... i, o i, o -> ... o"
reduce = { i = "sum" }
linear = [[0, 2], [1, 2]]
bias = [2]
"""
ROLES = """
[[role]]
name = "mlp"
axis = "ffn"
"""


def read(tmp_path: Path, *files: str, roles: str = ROLES) -> Rulebook:
    (tmp_path / "aten").mkdir()
    for number, text in enumerate(files):
        (tmp_path / "aten" / f"{number}.toml").write_text(text)
    (tmp_path / "roles.toml").write_text(roles)
    return load_rulebook(tmp_path)


def test_a_row_is_read_as_it_stands(tmp_path: Path) -> None:
    row = read(tmp_path, ROW).rows["aten.linear.default"]

    assert "... i, o i, o -> ... o" == str(row.signature)
    assert {"i": "sum"} == row.reduce
    assert (frozenset({0, 2}), frozenset({1, 2})) == row.linear
    assert (frozenset({2}), "", "0.toml") == (row.bias, row.emit, row.source)


def test_ops_of_one_row_share_it(tmp_path: Path) -> None:
    text = '[[row]]\nops = ["aten.relu.default", "aten.tanh.default"]\nrule = "... -> ..."\n'
    rows = read(tmp_path, text).rows

    assert rows["aten.relu.default"].signature == rows["aten.tanh.default"].signature


def test_an_op_may_have_sample_calls_of_its_own(tmp_path: Path) -> None:
    text = """
[[row]]
ops = ["aten.relu.default", "aten.log.default"]
rule = "... -> ..."
samples = ["real(6, 2)"]

[row.samples_of]
"aten.log.default" = ["positive(6, 2)", "positive(6)"]
"""
    rows = read(tmp_path, text).rows

    assert ("real(6, 2)",) == rows["aten.relu.default"].samples
    assert ("positive(6, 2)", "positive(6)") == rows["aten.log.default"].samples


def test_roles_keep_their_order(tmp_path: Path) -> None:
    roles = '[[role]]\nname = "attention"\ninside = ["aten.softmax.int"]\naxis = "heads"\n' + ROLES
    found = read(tmp_path, ROW, roles=roles).roles

    assert ["attention", "mlp"] == [role.name for role in found]
    assert [frozenset({"aten.softmax.int"}), frozenset()] == [role.inside for role in found]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bias =", "biases =", "unknown key 'biases'; the keys are aligned, bias, "),
        ('ops = ["aten.linear.default"]', "ops = []", 'names no op: set ops = ["namespace'),
        ("rule =", "note =", "needs exactly one of `rule` and `derive`"),
        ("bias = [2]", 'derive = "view"', "needs exactly one of `rule` and `derive`"),
        ('"sum"', '"product"', "reduce of 'i' is 'product', not one of max, mean, none, sum"),
        ('reduce = { i = "sum" }', "", "factor 'i' is contracted: say how in `reduce` or `whole`"),
        ('{ i = "sum" }', '{ i = "sum", u = "sum" }', "factor 'u' is in no operand"),
        ("bias = [2]", "bias = [3]", "operand 3 is not one of the rule's 3"),
        ("[0, 2]", "[0, 5]", "operand 5 is not one of the rule's 3"),
        ('... o"', '... u"', "factor 'u' of a result is in no operand"),
        ("ops = [", "ops = ", "cannot be read"),
        ("bias = [2]", 'samples = "real(6)"', "`samples` must be a list of calls as text, such as"),
        ("bias = [2]", "samples = [1]", "`samples` must be a list of calls as text, such as"),
        (
            "bias = [2]",
            'samples_of = { "aten.linear.default" = "real(6)" }',
            "`aten.linear.default` must be a list of calls as text, such as",
        ),
        (
            "bias = [2]",
            'samples_of = { "aten.mm.default" = ["real(6)"] }',
            "`samples_of` has 'aten.mm.default', which is not one of the row's `ops`. Add it",
        ),
        (
            "bias = [2]",
            'bias = [2]\n[row.samples_of]\nnote = "why"',
            "`samples_of` has 'note', which is not one of the row's `ops`. Add it to `ops`; if it",
        ),
    ],
)
def test_a_wrong_row_is_told_with_its_file(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in ROW

    with pytest.raises(RuleError, match=re.escape(message)) as caught:
        read(tmp_path, ROW.replace(old, new))
    assert "0.toml" in str(caught.value)


def test_two_rows_for_one_op_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"1\.toml: op aten.linear.default has a row already, in 0"):
        read(tmp_path, ROW, ROW)


def test_a_missing_directory_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match="has no roles.toml, so it is not a directory of rules"):
        load_rulebook(tmp_path)


def test_the_rules_of_the_house_load() -> None:
    rules = load_rulebook()

    assert (find_rules_root() / "roles.toml").is_file()
    assert len(rules.rows) > 200
    assert [] == [r for r in rules.roles[:-1] if not r.inside] + list(rules.roles[-1].inside)


def test_rows_name_only_rules_and_forms_of_the_closed_lists() -> None:
    rows = load_rulebook().rows.values()

    assert set() == {row.derive for row in rows} - {*RULES, ""}
    assert set() == {row.emit for row in rows} - {*FORMS}
    assert set() == set(RULES) - {row.derive for row in rows}


def test_a_role_looks_for_ops_that_have_rows() -> None:
    rules = load_rulebook()

    assert set() == {op for role in rules.roles for op in role.inside} - set(rules.rows)


def test_the_page_on_rules_explains_every_key_rule_and_form() -> None:
    page = (Path(__file__).parents[2] / "rules" / "README.md").read_text(encoding="utf-8")
    words = {*ROW_KEYS, *RULES, *FORMS} - {""}

    assert [] == sorted(word for word in words if f"`{word}`" not in page)


def test_the_page_on_rules_says_how_many_rows_name_a_function() -> None:
    page = (find_rules_root() / "README.md").read_text(encoding="utf-8")
    files = [
        tomllib.loads(path.read_text()) for path in (find_rules_root() / "aten").glob("*.toml")
    ]
    rows = [row for file in files for row in file["row"]]

    assert f"{sum('derive' in row for row in rows)} of the {len(rows)} rows name a Python" in page
