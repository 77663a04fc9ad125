"""Reads of X, and time, that each step rule takes to a certified gap."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import Chart, Curve, Goal, Result, Setting, Table, real_sets

from dswml.dataset import Dataset, open_dataset
from dswml.executor import InProcessExecutor
from dswml.frank_wolfe import Options, Solution
from dswml.synth import synthesize
from dswml.training import Parameters, train

GAPS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
#: Step rules, and whether gaps may use the curvature of F: only the corrective one does.
RULES = {
    "corrective": ("corrective", True),
    "corrective, gap of Eq. 37": ("corrective", False),
    "line-search": ("line-search", False),
    "open-loop": ("open-loop", False),
}
#: Most iterations. Those of open-loop are more than a hundred times the passes of the corrective rule.
LIMITS = {"corrective": 1000, "line-search": 400, "open-loop": 1200}


@dataclass(frozen=True)
class Reached:
    """Passes, seconds and CPU seconds to a gap, measured or extrapolated, and the passes that were made."""

    passes: float
    seconds: float
    cpu: float
    made: float
    measured: bool = True

    def __str__(self) -> str:
        return f"{self.passes:.0f}" if self.measured else f"~{self.passes:.2g}".replace("e+0", "e")


def timed_fit(
    data: Dataset, radius: float, weights: str = "sparsity", **options: Any
) -> tuple[Solution, list[float]]:
    """Return the solution, and the CPU seconds of all threads at each of its records."""
    parameters = Parameters(radius=radius, weights=weights, options=Options(**options))
    started = time.process_time()
    cpu: list[float] = []
    with InProcessExecutor() as executor:
        callbacks = [lambda record: cpu.append(time.process_time() - started)]
        return train(data, parameters, executor, callbacks=callbacks)[1], cpu


def reached(found: Solution, cpu: list[float], gap: float) -> Reached:
    """When the certified relative gap was first so small, or would be if it went on to fall.

    The gap is taken to fall on like 1/k, as in theory, or like the power law of the second half of the
    iterations if that was faster; iterations go on to cost what the last tenth of them did.
    """
    for record, seconds in zip(found.history, cpu, strict=True):
        if record.certified and record.relative_gap <= gap:
            return Reached(record.passes, record.seconds, seconds, record.passes)
    gaps = np.minimum.accumulate([record.relative_gap for record in found.history])
    half = slice(max(len(gaps) // 2, 1), None)
    slope = np.polyfit(np.log(np.arange(len(gaps))[half]), np.log(gaps[half]), 1)[0]
    share = (gaps[-1] / gap) ** (1 / max(-slope, 1.0))
    more = (share - 1) * (len(gaps) - 1)  # iterations, each like those of the last tenth
    tail = -max(len(gaps) // 10, 2)
    passes, seconds, cpus = (
        values[-1] + more * (values[-1] - values[tail]) / (-tail - 1)
        for values in ([r.passes for r in found.history], [r.seconds for r in found.history], cpu)
    )
    return Reached(passes, seconds, cpus, found.passes, measured=False)


def synthetic(setting: Setting, labels: int) -> Dataset:
    """Make the paper's synthetic data, ten times as many rows as there."""
    store = setting.scratch / f"synthetic-{labels}.zarr"
    if not store.exists():
        synthesize(
            store, rows=setting.pick(2000, 200), features=100, labels=100, sparsity=labels, dtype="float64"
        )
    return open_dataset(store)


def run(setting: Setting) -> Result:
    """Every step rule on every set."""
    found = Result(
        "passes",
        "Passes over the data",
        "How many reads of X, and how many seconds, does a certified relative gap take with each step rule?",
    )
    sets = {name: (data, setting.pick(100.0, 20.0)) for name, data in real_sets(setting).items()}
    for labels in setting.pick((2, 10), (2,)):
        sets[f"synthetic, K = {labels}"] = (synthetic(setting, labels), 30.0)
    lines, times = [], []
    for name, (data, radius) in sets.items():
        timed_fit(data, radius, max_iter=2)  # compiles, and has the system keep the files
        curves, fits = [], {}
        for rule, (step, curvature) in RULES.items():
            limit = setting.pick(LIMITS[step], 12)
            solution, cpu = timed_fit(
                data, radius, step=step, curvature=curvature, tol=GAPS[-1], max_iter=limit
            )
            fits[rule] = reached(solution, cpu, 1e-3)
            cells = [str(reached(solution, cpu, gap)) for gap in GAPS]
            last = f"{solution.iterations} iterations, {solution.seconds:.1f} s"
            lines.append([f"{name}, {rule}", *cells, f"{solution.objective:.6f}", last])
            history = [record for record in solution.history if record.certified]
            curves.append(
                Curve(rule, [r.passes for r in history], [max(r.relative_gap, 1e-12) for r in history])
            )
            found.raw[f"{name}, {rule}"] = [
                [r.passes, r.seconds, r.objective, r.relative_gap] for r in history
            ]
        fast, slow = fits["corrective, gap of Eq. 37"], fits["open-loop"]
        about = "" if slow.measured else "~"
        times.append(
            [
                name,
                f"{fast.seconds:.2f}",
                f"{about}{slow.seconds:.3g}",
                f"{about}{slow.seconds / max(fast.seconds, 1e-9):.0f}",
                f"{about}{slow.cpu / max(fast.cpu, 1e-9):.0f}",
            ]
        )
        how = "" if slow.measured else f"open-loop is not there after {slow.made} passes; {slow} extrapolated"
        if not name.startswith("synthetic"):
            found.goals.append(
                Goal(
                    f"{name}: passes of open-loop / of corrective to 1e-3, both by Eq. 37",
                    slow.made / fast.passes,
                    100,
                    False,
                    how,
                )
            )
        if name == "delicious":
            found.goals.append(
                Goal(
                    "delicious: seconds of open-loop / of corrective to 1e-3",
                    slow.seconds / fast.seconds,
                    100,
                    False,
                    "" if slow.measured else "open-loop is extrapolated",
                )
            )
        found.charts.append(
            Chart(
                f"{name}, radius {radius:g}",
                "Certified relative gap against reads of X.",
                "passes over X",
                "relative gap",
                curves,
                level=1e-3,
                level_name="10⁻³",
            )
        )
    header = ["set, step rule", *(f"{gap:.0e}".replace("e-0", "e-") for gap in GAPS), "objective", "run"]
    found.tables.append(Table("Passes over X to a certified relative gap", header, lines))
    header = ["set", "corrective, s", "open-loop, s", "times", "times, CPU"]
    found.tables.append(Table("Time to a relative gap of 1e-3, in the same process", header, times))
    found.notes.append(
        "~: extrapolated, not measured: from the last gap on like 1/k, or like the power law of the "
        "second half of the iterations where that was faster. The corrective rule is used with gaps that "
        "count the curvature of F; with the same gap as the others it is shown for comparison."
    )
    return found
