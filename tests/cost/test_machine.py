"""Machines: the two that ship, the link a group runs over, and what a bad file is told."""

from pathlib import Path

import pytest

from autotp.cost.machine import Machine, list_machines, load_machine
from autotp.errors import PlanError

RULES = Path(__file__).parents[2] / "rules"
GOOD = (RULES / "machines" / "h100.toml").read_text()


def _written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_the_machines_that_ship_are_found_by_name() -> None:
    names = list_machines(RULES)

    assert ["gloo", "h100"] == names
    assert names == [load_machine(name, RULES).name for name in names]


def test_every_figure_names_its_source() -> None:
    for name in list_machines(RULES):
        machine = load_machine(name, RULES)

        assert machine.source
        assert all(link.source for link in machine.links)


def test_h100_has_the_figures_of_its_data_sheet() -> None:
    h100 = load_machine("h100", RULES)

    assert 8 == h100.devices_per_node
    assert 80 * 10**9 == h100.memory_bytes
    assert 3_350 * 10**9 == h100.memory_bandwidth
    assert 989e12 == h100.flops["bfloat16"]


@pytest.mark.parametrize(
    ("tp", "link", "bandwidth"),
    [(2, "NVLink", 450), (8, "NVLink", 450), (9, "InfiniBand", 50), (64, "InfiniBand", 50)],
)
def test_a_group_runs_over_the_fastest_link_that_reaches(
    tp: int, link: str, bandwidth: int
) -> None:
    found = load_machine("h100", RULES).find_link(tp)

    assert (link, bandwidth * 10**9) == (found.name, found.bytes_per_second)


def test_a_group_beyond_every_link_is_refused() -> None:
    gloo = load_machine("gloo", RULES)

    with pytest.raises(PlanError, match="machine gloo: no link connects 65 devices.*reaches 64"):
        gloo.find_link(65)


def test_a_machine_file_may_lie_anywhere(tmp_path: Path) -> None:
    path = _written(tmp_path, GOOD.replace('name = "h100"', 'name = "mine"'))

    machine = load_machine(path, RULES)

    assert isinstance(machine, Machine)
    assert "mine" == machine.name


def test_a_machine_file_may_leave_out_what_no_cost_depends_on(tmp_path: Path) -> None:
    links = GOOD[GOOD.index("[[links]]") :]
    path = _written(tmp_path, f'name = "mine"\ndescription = "two devices"\n{links}')

    machine = load_machine(path, RULES)

    assert load_machine("h100", RULES).links == machine.links
    assert (None, None, None) == (
        machine.devices_per_node,
        machine.memory_bytes,
        machine.memory_bandwidth,
    )
    assert {} == machine.flops


def test_an_unknown_name_is_told_the_known_ones_and_the_closest() -> None:
    with pytest.raises(PlanError, match="'h10' is unknown. Did you mean 'h100'.*gloo, h100"):
        load_machine("h10", RULES)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("reach = 8", "reach = 0", "NVLink.reach is 0, it must be positive"),
        ("reach = 8", "reach = 'far'", r"links\[0\].reach: expected int, found str 'far'"),
        ("reach = 8", "", r"links\[0\]: missing key 'reach'"),
        ("reach = 8", "reach = ", "line 20, column 9"),
        ("memory_bytes", "memory_bites", "unknown key 'memory_bites'"),
        ("memory_bytes = 80", "memory_bytes = 0 # ", "memory_bytes is 0, it must be positive"),
        ("float64 = 67e12", "float64 = -1.0", "flops.float64 is -1.0, it must be positive"),
        ("latency_ps = 10_000_000", "latency_ps = -1", "NVLink.latency_ps is -1"),
    ],
)
def test_a_broken_file_is_told_where(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = _written(tmp_path, GOOD.replace(old, new, 1))

    with pytest.raises(PlanError, match=reason) as caught:
        load_machine(path, RULES)

    assert str(path) in str(caught.value)


def test_a_missing_file_is_told_by_path(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.toml"):
        load_machine(tmp_path / "none.toml", RULES)
