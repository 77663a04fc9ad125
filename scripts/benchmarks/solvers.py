"""Other solvers of the same problem: time to the same objective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from common import Chart, Curve, Goal, Result, Setting, Table, real_sets
from peer import NotInstalledError, call_peer
from scipy.sparse.linalg import svds

from dswml.dataset import Dataset
from dswml.executor import InProcessExecutor
from dswml.frank_wolfe import Options, Record
from dswml.training import Parameters, train

Trace = list[tuple[float, float]]


def ours(data: Dataset, radius: float, tol: float) -> Trace:
    """Seconds and objective of every iteration of a fit, start included."""
    begin = time.perf_counter()
    trace: Trace = []

    def note(record: Record) -> None:
        trace.append((time.perf_counter() - begin, record.objective))

    with InProcessExecutor() as executor:
        options = Options(tol=tol)
        train(data, Parameters(radius=radius, options=options), executor, callbacks=[note])
    return trace


def numpy_svds(x: Any, y: Any, p0: float, radius: float, target: float, limit: float) -> Trace:
    """Frank-Wolfe as one writes it with NumPy: all scores, all of the gradient, `svds` for its top pair."""
    n_rows, truth = x.shape[0], y.toarray()
    weight = np.where(truth > 0, 1 - p0, p0)
    w = np.zeros((x.shape[1], truth.shape[1]))
    begin, trace = time.perf_counter(), []
    for k in range(10**6):
        error = x @ w - truth
        trace.append((time.perf_counter() - begin, float(np.sum(weight * error**2)) / n_rows))
        if trace[-1][1] <= target or trace[-1][0] > limit:
            return trace
        gradient = x.T @ (2 / n_rows * weight * error)
        u, _, vt = svds(gradient, k=1)
        step = 2 / (k + 2)
        w = (1 - step) * w - step * radius * u @ vt
    return trace


def dask_array(x: Any, y: Any, p0: float, radius: float, target: float, limit: float) -> Trace:
    """The same with dask.array: a lazy dense gradient and its compressed decomposition."""
    import dask.array as da

    n_rows = x.shape[0]
    rows = -(-n_rows // 4)
    features = da.from_array(x.toarray(), chunks=(rows, -1)).persist()
    truth = da.from_array(y.toarray(), chunks=(rows, -1)).persist()
    weight = da.where(truth > 0, 1 - p0, p0).persist()
    w = np.zeros((x.shape[1], y.shape[1]))
    begin, trace = time.perf_counter(), []
    for k in range(10**6):
        error = features @ w - truth
        gradient = (features.T @ (2 / n_rows * weight * error)).rechunk(-1)
        u, _, vt = da.linalg.svd_compressed(gradient, k=1, n_power_iter=4, seed=0)
        objective, u, vt = da.compute((weight * error**2).sum() / n_rows, u, vt)
        trace.append((time.perf_counter() - begin, float(objective)))
        if trace[-1][1] <= target or trace[-1][0] > limit:
            return trace
        step = 2 / (k + 2)
        w = (1 - step) * w - step * radius * u @ vt
    return trace


def run(setting: Setting) -> Result:
    """All solvers on delicious, to the objective that ours is certified at."""
    found = Result(
        "solvers",
        "Other solvers of the same problem",
        "How long do other programs take to the objective at which dswml certifies a gap of 1e-3?",
    )
    (name, data), *_ = real_sets(setting, ["delicious"]).items()
    radius, tol = setting.pick((100.0, 1e-3), (20.0, 1e-1))
    x, y = sp.csr_matrix(data.read_x(0, data.n_rows)), sp.csr_matrix(data.read_y(0, data.n_rows))
    ours(data, radius, 1e-1)  # compiles, and has the system keep the files
    traces = [ours(data, radius, tol) for _ in range(setting.repeats)]
    own = float(np.median([trace[-1][0] for trace in traces]))
    target = traces[0][-1][1]
    limit = setting.pick(max(60 * own, 150.0), 1.0)
    others: dict[str, Callable[[], Trace]] = {
        "NumPy with svds": lambda: numpy_svds(x, y, data.p0, radius, target, limit),
        "dask.array": lambda: dask_array(x, y, data.p0, radius, target, limit),
        "copt": lambda: call_peer(
            "copt", setting, {"x": x, "y": y}, p0=data.p0, radius=radius, target=target, limit=limit
        )["trace"],
    }
    lines = [["dswml", f"{own:.2f}", f"{target:.6f}", "1"]]
    curves = [Curve("dswml", [t for t, _ in traces[0]], [f for _, f in traces[0]])]
    for other, solve in others.items():
        try:
            trace = solve()
        except NotInstalledError as error:
            found.notes.append(str(error))
            found.goals.append(Goal(f"{name}: time of {other} / of dswml", None, 50, False, "not installed"))
            continue
        seconds, objective = trace[-1]
        there = objective <= target
        lines.append(
            [
                other,
                f"{'' if there else 'more than '}{seconds:.0f}",
                f"{objective:.6f}",
                f"{'' if there else '> '}{seconds / own:.0f}",
            ]
        )
        how = "" if there else f"stopped at {objective:.4f}, {(objective / target - 1):.1%} above"
        found.goals.append(Goal(f"{name}: time of {other} / of dswml", seconds / own, 50, False, how))
        keep = np.unique(np.geomspace(1, len(trace), 60).astype(int)) - 1
        curves.append(Curve(other, [trace[i][0] for i in keep], [trace[i][1] for i in keep]))
        found.raw[other] = [trace[i] for i in keep]
    found.raw["dswml"] = traces
    found.tables.append(
        Table(
            f"{name}, radius {radius:g}: time to the objective {target:.6f}",
            ["solver", "seconds", "objective", "times"],
            lines,
        )
    )
    found.charts.append(
        Chart(
            f"{name}, radius {radius:g}",
            "Objective against time.",
            "seconds",
            "objective",
            curves,
            level=target,
            level_name="target",
        )
    )
    return found
