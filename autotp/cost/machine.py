"""The machine for which costs are estimated: its links and the figures of its devices.

A machine is a TOML file in `rules/machines/`, with the sources of its figures:

    name = "h100"
    description = "NVIDIA H100 SXM5 80 GB"
    [[links]]
    name = "NVLink"
    latency_ps = 10_000_000
    bytes_per_second = 450_000_000_000
    reach = 8
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from autotp.errors import PlanError
from autotp.records.json_record import RecordError, decode


@dataclass(frozen=True, slots=True)
class Link:
    """A link that connects up to `reach` devices.

    - `latency_ps`: the fixed time of one all-gather or reduce-scatter, in picoseconds.
    - `bytes_per_second`: the bandwidth per device and direction.
    """

    name: str
    latency_ps: int
    bytes_per_second: int
    reach: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of machine; all figures are per device.

    - `links`: from which costs are estimated.
    - `devices_per_node`, `memory_bytes`, `memory_bandwidth` (bytes per second), and `flops`: dtype
      name to dense operations per second. A file may leave them out: no cost depends on them yet.
    - `source`: where the figures come from.
    - `device`: the torch device type in graphs for this machine.
    """

    name: str
    description: str
    links: tuple[Link, ...]
    devices_per_node: int | None = None
    memory_bytes: int | None = None
    memory_bandwidth: int | None = None
    flops: Mapping[str, float] = field(default_factory=dict[str, float])
    source: str = ""
    device: str = "cuda"

    def find_link(self, tp: int) -> Link:
        """Find the fastest link that connects `tp` devices.

        Raises PlanError if there is none.
        """
        reaching = [link for link in self.links if link.reach >= tp]
        if not reaching:
            most = max(link.reach for link in self.links)
            raise PlanError(
                f"machine {self.name}: no link connects {tp} devices; the longest reaches {most}. "
                f"Choose a tp of at most {most}, or a machine file with a longer link."
            )
        return max(reaching, key=lambda link: link.bytes_per_second)


def list_machines(root: Path) -> list[str]:
    """List the names of the machines in the rules directory `root`, sorted."""
    return sorted(path.stem for path in (root / "machines").glob("*.toml"))


def load_machine(name_or_path: str | Path, root: Path) -> Machine:
    """Load the machine called `name_or_path` from the rules directory `root`, or from that file.

    Raises PlanError for an unknown name, an unreadable file or impossible figures.
    """
    path = _find_file(str(name_or_path), root)
    try:
        machine = decode(Machine, tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecordError) as error:
        raise PlanError(f"machine file {path}: {error}. {_SHAPE}") from error
    if reason := _find_fault(machine):
        raise PlanError(f"machine file {path}: {reason}. {_SHAPE}")
    return machine


_SHAPE = "rules/machines/h100.toml shows every key that such a file may have."


def _find_file(name: str, root: Path) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    known = list_machines(root)
    if name in known:
        return root / "machines" / f"{name}.toml"
    close = get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise PlanError(
        f"machine {name!r} is unknown. {hint}The known machines are {', '.join(known)}. "
        "You can also give the path of a .toml file."
    )


def _find_fault(machine: Machine) -> str:
    """Say why the figures are impossible; empty if they are fine."""
    if not machine.links:
        return "it has no [[links]]"
    figures: dict[str, float | None] = {
        "devices_per_node": machine.devices_per_node,
        "memory_bytes": machine.memory_bytes,
        "memory_bandwidth": machine.memory_bandwidth,
    }
    figures |= {f"flops.{name}": rate for name, rate in machine.flops.items()}
    for link in machine.links:
        figures[f"{link.name}.bytes_per_second"] = link.bytes_per_second
        figures[f"{link.name}.reach"] = link.reach
        if link.latency_ps < 0:
            return f"{link.name}.latency_ps is {link.latency_ps}, it must not be negative"
    given = {name: figure for name, figure in figures.items() if figure is not None}
    return next((f"{k} is {v}, it must be positive" for k, v in given.items() if v <= 0), "")
