"""Runs other people's programs, each in a process of its own, in the environment that has them.

As a script it is that process: ``python peer.py NAME FOLDER`` reads matrices and options from the folder,
trains, predicts, and writes what it took. It needs nothing of dswml, so that peers may bring versions of
NumPy that dswml does not run on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

if TYPE_CHECKING:
    from common import Setting

#: Packages of the peers' environment, in the order in which they are installed.
PACKAGES = ("scikit-learn", "omikuji", "napkinxc", "libpecos", "copt")
#: Labels that a peer which ranks is asked for.
TOP = 50


class NotInstalledError(Exception):
    """A peer is not in the environment."""


def call_peer(name: str, setting: Setting, matrices: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Run a peer in its own process; return what it reports, with its scores if it made any."""
    python = setting.peers or Path(sys.executable)
    with tempfile.TemporaryDirectory(dir=setting.scratch) as folder:
        for key, matrix in matrices.items():
            sp.save_npz(Path(folder) / f"{key}.npz", sp.csr_matrix(matrix))
        (Path(folder) / "options.json").write_text(json.dumps(options))
        threads = {f"{each}_NUM_THREADS": str(len(os.sched_getaffinity(0))) for each in ("OMP", "OPENBLAS")}
        done = subprocess.run(
            [str(python), __file__, name, folder],
            env={**os.environ, **threads},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 3:
            raise NotInstalledError(f"{name} is not installed: {done.stderr.strip().splitlines()[-1]}")
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stderr[-2000:]}")
        report: dict[str, Any] = json.loads((Path(folder) / "report.json").read_text())
        scores = Path(folder) / "scores.npz"
        if scores.exists():
            report["scores"] = sp.load_npz(scores).toarray()
        return report


def _size(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


def _label_lists(y: sp.csr_matrix) -> list[list[int]]:
    return [y.indices[a:b].tolist() for a, b in zip(y.indptr, y.indptr[1:], strict=False)]


def _ranked(rows: list[list[tuple[int, float]]], n_labels: int) -> sp.csr_matrix:
    entries = [(row, label, score) for row, found in enumerate(rows) for label, score in found]
    row, label, score = zip(*entries, strict=True) if entries else ((), (), ())
    return sp.csr_matrix((score, (row, label)), shape=(len(rows), n_labels))


def ridge(x: Any, y: Any, test: Any, folder: str, alpha: float = 1.0) -> dict[str, Any]:
    from sklearn.linear_model import Ridge

    begin = time.perf_counter()
    model = Ridge(alpha=alpha).fit(x, y.toarray())
    trained = time.perf_counter()
    scores = model.predict(test)
    size = model.coef_.nbytes + model.intercept_.nbytes
    return {
        "train": trained - begin,
        "predict": time.perf_counter() - trained,
        "size": size,
        "scores": scores,
    }


def logistic(x: Any, y: Any, test: Any, folder: str, C: float = 1.0) -> dict[str, Any]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    begin = time.perf_counter()
    y = y.astype(np.int64)  # scikit-learn counts labels in the type of Y
    used = np.flatnonzero(np.asarray(y.sum(axis=0)).ravel())
    one = LogisticRegression(C=C, solver="liblinear")
    model = OneVsRestClassifier(one, n_jobs=len(os.sched_getaffinity(0))).fit(x, y[:, used])
    trained = time.perf_counter()
    scores = np.zeros((test.shape[0], y.shape[1]))
    scores[:, used] = model.predict_proba(test)
    size = 8 * used.size * (x.shape[1] + 1)
    return {
        "train": trained - begin,
        "predict": time.perf_counter() - trained,
        "size": size,
        "scores": scores,
    }


def napkin(x: Any, y: Any, test: Any, folder: str, kind: str = "PLT", **settings: Any) -> dict[str, Any]:
    from napkinxc import models

    begin = time.perf_counter()
    model = getattr(models, kind)(f"{folder}/model", threads=len(os.sched_getaffinity(0)), **settings)
    model.fit(x, _label_lists(y))
    trained = time.perf_counter()
    rows = model.predict_proba(test, top_k=min(TOP, y.shape[1]))
    predicted = time.perf_counter() - trained
    return {
        "train": trained - begin,
        "predict": predicted,
        "size": _size(f"{folder}/model"),
        "scores": _ranked(rows, y.shape[1]),
    }


def omikuji(x: Any, y: Any, test: Any, folder: str, **settings: Any) -> dict[str, Any]:
    import omikuji as package

    file = f"{folder}/train.txt"
    with open(file, "w") as out:
        out.write(f"{x.shape[0]} {x.shape[1]} {y.shape[1]}\n")
        for labels, a, b in zip(_label_lists(y), x.indptr, x.indptr[1:], strict=False):
            pairs = (f"{i}:{v:.7g}" for i, v in zip(x.indices[a:b], x.data[a:b], strict=True))
            out.write(f"{','.join(map(str, labels))} {' '.join(pairs)}\n")
    begin = time.perf_counter()
    settled = package.Model.default_hyper_param()
    for key, value in settings.items():
        setattr(settled, key, value)
    model = package.Model.train_on_data(file, settled, n_threads=len(os.sched_getaffinity(0)))
    trained = time.perf_counter()
    rows = [
        model.predict(
            list(zip(test.indices[a:b].tolist(), test.data[a:b].tolist(), strict=True)),
            top_k=min(TOP, y.shape[1]),
        )
        for a, b in zip(test.indptr, test.indptr[1:], strict=False)
    ]
    predicted = time.perf_counter() - trained
    model.save(f"{folder}/model")
    return {
        "train": trained - begin,
        "predict": predicted,
        "size": _size(f"{folder}/model"),
        "scores": _ranked(rows, y.shape[1]),
    }


def pecos(x: Any, y: Any, test: Any, folder: str, **settings: Any) -> dict[str, Any]:
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    x, test, y = x.astype(np.float32), test.astype(np.float32), y.astype(np.float32)
    begin = time.perf_counter()
    chain = Indexer.gen(LabelEmbeddingFactory.create(y, x, method="pifa"))
    model = XLinearModel.train(x, y, C=chain, **settings)
    trained = time.perf_counter()
    scores = model.predict(test, only_topk=min(TOP, y.shape[1]))
    predicted = time.perf_counter() - trained
    model.save(f"{folder}/model")
    return {
        "train": trained - begin,
        "predict": predicted,
        "size": _size(f"{folder}/model"),
        "scores": scores,
    }


def copt(x: Any, y: Any, p0: float, radius: float, target: float, limit: float) -> dict[str, Any]:
    """Minimise the weighted loss over the trace ball with copt's own Frank-Wolfe, step rule by default."""
    import copt as package
    from copt.constraint import TraceBall

    n_rows, truth = x.shape[0], y.toarray()
    weight = np.where(truth > 0, 1 - p0, p0)
    shape = (x.shape[1], y.shape[1])
    trace: list[tuple[float, float]] = []

    def value_and_gradient(w: Any) -> tuple[float, Any]:
        error = x @ w.reshape(shape) - truth
        gradient = x.T @ (2 / n_rows * weight * error)
        return float(np.sum(weight * error**2)) / n_rows, gradient.ravel()

    class Done(Exception):
        pass

    def look(state: dict[str, Any]) -> None:
        trace.append((time.perf_counter() - begin, float(state["f_t"])))
        if trace[-1][1] <= target or trace[-1][0] > limit:
            raise Done

    ball = TraceBall(radius, shape)
    begin = time.perf_counter()
    with suppress(Done):
        package.minimize_frank_wolfe(
            value_and_gradient, np.zeros(shape[0] * shape[1]), ball.lmo, tol=0, max_iter=10**6, callback=look
        )
    return {"trace": trace}


PEERS = {
    "Ridge": ridge,
    "logistic regression": logistic,
    "napkinXC": napkin,
    "omikuji": omikuji,
    "PECOS": pecos,
}


def main(name: str, folder: str) -> int:
    """Do what the folder asks for."""
    matrices = {file.stem: sp.load_npz(file).tocsr() for file in Path(folder).glob("*.npz")}
    options = json.loads(Path(folder, "options.json").read_text())
    try:
        report = (
            copt(**matrices, **options)
            if name == "copt"
            else PEERS[name](**matrices, folder=folder, **options)
        )
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 3
    scores = report.pop("scores", None)
    if scores is not None:
        sp.save_npz(Path(folder) / "scores.npz", sp.csr_matrix(scores))
    Path(folder, "report.json").write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
