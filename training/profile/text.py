"""A profile as text that a person reads."""

from collections.abc import Mapping, Sequence

from training.profile.measure import Operator, Profile
from training.profile.ranges import OTHER
from training.profile.trace import PhaseMemory

MIB = 2**20
TOP = 10  # operators, and functions of ours

# kind of a phase (what follows the network's name) -> the group it is shown in, in order
GROUPS = {
    "data": "data wait",
    "augment": "augment",
    "forward": "forward",
    "samples": "forward",  # the discriminator's fakes
    "backward": "backward",
    "penalty": "penalty",
    "path_length": "penalty",
    "optimizer": "optimizer",
    "ema": "ema",
}


def render(profile: Profile, heading: str, trace: str) -> str:
    """The summary. `heading`: what was profiled; `trace`: where the trace is."""
    parts = [
        heading,
        time_table(profile),
        "\n".join([*_notes(profile), *_memory_notes(profile)]),
        operator_table(profile.operators, profile.accelerator),
        function_table(profile),
        f"trace of the steps: {trace} (open it at https://ui.perfetto.dev or in chrome://tracing)",
    ]
    return "\n\n".join(parts) + "\n"


def group_of(phase: str) -> str:
    """The group that a phase is shown in; an unknown one is its own."""
    return OTHER if phase == OTHER else GROUPS.get(phase.rpartition("/")[2], phase)


def whole_shares(seconds: Mapping[str, float]) -> dict[str, int]:
    """Shares in tenths of a percent that add up to 1000: rounded down, and the largest remainders up."""
    total = sum(seconds.values())
    if total <= 0:
        return dict.fromkeys(seconds, 0)
    exact = {name: 1000 * value / total for name, value in seconds.items()}
    shares = {name: int(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: 1000 - sum(shares.values())]:
        shares[name] += 1
    return shares


def time_table(profile: Profile) -> str:
    """Groups, their phases, ms a step, share of the step, and memory by phase; the last line is the whole step."""
    shares = whole_shares(profile.phases)
    groups: dict[str, list[str]] = {}
    for name in sorted(profile.phases, key=lambda name: _rank(group_of(name))):
        groups.setdefault(group_of(name), []).append(name)
    rows = [["", "ms a step", "share", "adds MiB", "holds MiB at most"]]
    for group, names in groups.items():
        memory = [profile.memory.get(name, PhaseMemory(0.0, 0)) for name in names]
        whole = PhaseMemory(sum(m.adds for m in memory), max(m.peak for m in memory))
        rows.append(_row(group, sum(profile.phases[n] for n in names), sum(shares[n] for n in names), whole))
        if any("/" in name and name != OTHER for name in names):
            rows += [
                _row(f"  {name}", profile.phases[name], shares[name], m) for name, m in zip(names, memory, strict=True)
            ]
    step = PhaseMemory(sum(m.adds for m in profile.memory.values()), profile.peak)
    rows.append(_row("step", sum(profile.phases.values()), sum(shares.values()), step))
    return columns(rows)


def _rank(group: str) -> int:
    order = list(dict.fromkeys(GROUPS.values()))
    return order.index(group) if group in order else len(order) + (group == OTHER)


def _row(label: str, seconds: float, share: int, memory: PhaseMemory) -> list[str]:
    adds = memory.adds / MIB
    return [label, f"{seconds * 1e3:.2f}", f"{share / 10:.1f} %", f"{adds:+.1f}", f"{memory.peak / MIB:.1f}"]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _notes(profile: Profile) -> list[str]:
    costs = ", ".join(f"{name} {100 * share:+.0f} %" for name, share in profile.overhead.items())
    how = "in all" if profile.accelerator else "median of each step against the same one with none"
    waits = ", which wait for the accelerator" if profile.accelerator else ""
    return [
        f"A step takes {profile.plain * 1e3:.2f} ms with no instrument. The times above are from clocks at the "
        f"phases{waits};",
        "the same steps were run for every instrument.",
        f"Cost of the instruments: {costs}",
        f"({how}).",
        f"Host: in {100 * profile.python_share:.1f} % of the time under torch.profiler no operator was running: Python "
        "and waiting.",
    ]


def _memory_notes(profile: Profile) -> list[str]:
    if profile.accelerator:
        peak = f"the accelerator had {profile.process_peak / MIB:.0f} MiB allocated at most"
    else:
        peak = f"the process was resident with {profile.process_peak / MIB:.0f} MiB at most"
    return [
        f"Memory: a step holds up to {profile.peak / MIB:.1f} MiB of tensors besides weights, moments and averages;",
        f"{peak}. `adds`: allocated less given back in a phase;",
        "`holds at most`: the tensors of the step while the phase ran, gradients among them.",
    ]


def operator_table(operators: Sequence[Operator], accelerator: bool) -> str:
    """The most costly operators."""
    where = "on the accelerator" if accelerator else "on the CPU"
    rows = [[f"operators, own time {where}", "ms a step", "share", "calls a step"]]
    rows += [[o.name, f"{o.seconds * 1e3:.2f}", f"{100 * o.share:.1f} %", f"{o.calls:.4g}"] for o in operators[:TOP]]
    return columns(rows)


def function_table(profile: Profile) -> str:
    """The functions of ours whose own Python costs most, and all Python by where it comes from."""
    rows = [["functions of ours, under cProfile", "own ms a step", "with callees", "calls a step"]]
    rows += [
        [f"{f.place} {f.name}", f"{f.own_seconds * 1e3:.3f}", f"{f.seconds * 1e3:.2f}", f"{f.calls:.4g}"]
        for f in profile.functions[:TOP]
    ]
    python = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in profile.python.items())
    return "\n".join(
        [
            columns(rows),
            f"own ms a step: {python}. `own` is Python, and operators written as such (a * b);",
            "those that are called (F.conv2d) are among the built-in ones.",
        ]
    )
