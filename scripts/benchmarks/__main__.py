"""Runs benchmarks by name and writes what they found: a JSON file each, and one page of all."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from common import Result, Setting, machine
from page import benchmark_page

#: Benchmarks by their names, in the order of the page, with their modules.
NAMES = {
    "limit": "limit",
    "out-of-core": "out_of_core",
    "passes": "passes",
    "solvers": "solvers",
    "peers": "peers",
    "growth": "growth",
    "extreme": "extreme",
    "scheduler": "scheduler",
    "cross-validation": "crossval",
}


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; 0 if every goal that was measured is met."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("names", nargs="*", default=["all"], help=f"all, or some of: {', '.join(NAMES)}")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-output"), help="folder of the results (default bench-output)"
    )
    parser.add_argument(
        "--scratch", type=Path, help="folder for generated data, kept; a temporary one by default"
    )
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each figure (default 3)")
    parser.add_argument("--tiny", action="store_true", help="seconds instead of hours: shows that all runs")
    parser.add_argument(
        "--peers", type=Path, help="interpreter of the environment that has the other programs"
    )
    options = parser.parse_args(arguments)
    names = list(NAMES) if "all" in options.names else options.names
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}: choose from {', '.join(NAMES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    with tempfile.TemporaryDirectory(prefix="dswml-bench-") as temporary:
        scratch = options.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        setting = Setting(
            scratch.resolve(), options.tiny, 1 if options.tiny else options.repeats, options.peers
        )
        for name in names:
            about, begin = machine(), time.perf_counter()
            found: Result = import_module(NAMES[name]).run(setting)
            report = {**found.as_json(), "machine": about, "seconds": time.perf_counter() - begin}
            (options.out / f"{name}.json").write_text(json.dumps(report, indent=1, default=float))
            print(f"{found.title}, {report['seconds']:.0f} s")
            for goal in found.goals:
                how = {True: "met", False: "MISSED", None: "not measured"}[goal.met]
                measured = "-" if goal.measured is None else f"{goal.measured:.3g}"
                bound = f"{'at most' if goal.at_most else 'at least'} {goal.limit:g}"
                print(
                    f"  {goal.text}: {measured}, {bound}: {how}{goal.note and f' ({goal.note})'}", flush=True
                )
                good = good and goal.met is not False
    reports = [options.out / f"{name}.json" for name in NAMES]
    page = options.out / "index.html"
    page.write_text(benchmark_page([json.loads(file.read_text()) for file in reports if file.exists()]))
    print(f"The page is {page}")
    return 0 if good or options.tiny else 1


if __name__ == "__main__":
    sys.exit(main())
