"""A set of the size of Amazon-670K, with labels sharded over the workers."""

from __future__ import annotations

import time

from common import GB, MIB, Goal, Result, Setting, Table, local_workers
from growth import make, watched

from dswml.frank_wolfe import Options, Record
from dswml.training import Parameters, train


def run(setting: Setting) -> Result:
    """A fit of twenty iterations, all memory counted."""
    found = Result(
        "extreme",
        "The size of Amazon-670K",
        "Does a set of half a million rows, 135 000 features and 670 000 labels train in a few GB of memory?",
    )
    rows, features, labels = setting.pick((490_000, 135_000, 670_000), (500, 300, 600))
    data = make(
        setting,
        "extreme",
        rows=rows,
        features=features,
        labels=labels,
        sparsity=5,
        kind="extreme",
        normalize="l2",
    )
    iterations = setting.pick(20, 2)
    limit = setting.pick(2 * GB, 512 * MIB)
    records: list[tuple[float, float]] = []

    def note(record: Record) -> None:
        records.append((time.perf_counter() - begin, record.objective))
        print(f"  iteration {record.iteration}, {record.passes} passes, {records[-1][0]:.0f} s", flush=True)

    with watched() as memory, local_workers(2, limit) as executor:
        begin = time.perf_counter()
        options = Options(
            tol=0.0,
            max_iter=iterations,
            memory_limit=setting.pick(3 * GB // 2, 2**28),
            shard_labels=setting.pick(True, None),
        )
        _, solution = train(
            data, Parameters(radius=100.0, weights=0.1, options=options), executor, callbacks=[note]
        )
        took = time.perf_counter() - begin
    found.tables.append(
        Table(
            f"{rows:,} rows, {features:,} features, {labels:,} labels, 5 labels a row",
            ["what", "figure"],
            [
                ["iterations", str(solution.iterations)],
                ["passes", str(solution.passes)],
                ["seconds", f"{took:.0f}"],
                ["seconds a pass", f"{took / max(solution.passes, 1):.1f}"],
                ["objective, first and last", f"{records[0][1]:.6f}, {solution.objective:.6f}"],
                ["peak memory of all processes, GB", f"{memory['peak'] / GB:.2f}"],
            ],
        )
    )
    found.goals.append(Goal("the size of Amazon-670K: memory in all, GB", memory["peak"] / GB, 6.0))
    found.goals.append(
        Goal("the size of Amazon-670K: iterations", float(solution.iterations), float(iterations), False)
    )
    found.raw["extreme"] = {"records": records, "peak": memory["peak"], "passes": solution.passes}
    return found
