"""The verb ``info``: what is in a store, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from dswml.cli import verb_options
from dswml.errors import telling

if TYPE_CHECKING:
    from dswml.dataset import Dataset
    from dswml.model import Model

__all__ = [
    "dataset_lines",
    "describe_checkpoint",
    "describe_dataset",
    "describe_model",
    "describe_prediction",
    "info",
    "model_lines",
]

Description = dict[str, Any]


def weight_note(k_hat: int, n_labels: int) -> str | None:
    """Say where the paper's weights (p0 = 2 K_hat / L) are of no use.

    Examples
    --------
    >>> weight_note(25, 983)
    >>> weight_note(3, 6)
    'p0 >= 1 because 2 K_hat >= L: no sparsity weights exist; train with uniform weights or a number for p0'
    """
    if 2 * k_hat >= n_labels:
        return (
            "p0 >= 1 because 2 K_hat >= L: no sparsity weights exist; "
            "train with uniform weights or a number for p0"
        )
    if 4 * k_hat >= n_labels:
        return "p0 >= 1/2 because 4 K_hat >= L: sparsity weights favour zeros here"
    return None


def describe_dataset(data: Dataset) -> Description:
    """Return everything that is known of a data set without reading its rows."""
    import numpy as np

    counts = data.label_counts
    return {
        "kind": "dataset",
        "url": data.url,
        "n_rows": data.n_rows,
        "n_features": data.n_features,
        "n_labels": data.n_labels,
        "nnz_x": data.nnz_x,
        "nnz_y": data.nnz_y,
        "k_hat": data.k_hat,
        "p0": data.p0 if data.n_labels else None,
        "p0_note": weight_note(data.k_hat, data.n_labels) if data.n_labels else None,
        "x_sparse": data.is_sparse,
        "x_dtype": str(data.x_dtype),
        "x_density": data.nnz_x / (data.n_rows * data.n_features),
        "y_density": data.nnz_y / (data.n_rows * data.n_labels) if data.n_labels else None,
        "labels_per_row": data.nnz_y / data.n_rows,
        "rows_per_label": {
            "min": int(counts.min()),
            "median": float(np.median(counts)),
            "mean": float(counts.mean()),
            "max": int(counts.max()),
            "labels_without_row": int((counts == 0).sum()),
        }
        if data.n_labels
        else None,
        "label_names": data.label_names is not None,
        "feature_names": data.feature_names is not None,
        "normalize": data.normalize,
        "row_blocks": len(data.blocks),
        "arrays": getattr(data, "layout", {}),
        "format_version": data.attrs.get("format_version"),
        "created_with": data.attrs.get("created_with"),
        "source": data.attrs.get("source"),
    }


def _scaling(normalize: str | None) -> str:
    return "as given" if normalize is None else f"scaled to unit {normalize} norm"


def dataset_lines(found: Mapping[str, Any]) -> list[str]:
    """Write a description of `describe_dataset` for people."""
    kind = "sparse" if found["x_sparse"] else "dense"
    lines = [
        f"{found['url']}: data set",
        f"  rows        {found['n_rows']:,}, {_scaling(found['normalize'])}, row blocks: "
        f"{found['row_blocks']}",
        f"  features    {found['n_features']:,}, {kind} {found['x_dtype']}, {found['nnz_x']:,} entries "
        f"({100 * found['x_density']:.3g} %, {found['nnz_x'] / found['n_rows']:.4g} a row)",
    ]
    rows = found["rows_per_label"]
    if rows is None:
        lines.append("  labels      none: the rows can be predicted, but nothing learnt from them")
    else:
        lines += [
            f"  labels      {found['n_labels']:,}, {found['nnz_y']:,} ones "
            f"({100 * found['y_density']:.3g} %, {found['labels_per_row']:.4g} a row)",
            f"  K_hat       {found['k_hat']} labels on a row at most",
            f"  p0          {found['p0']:.4g} = 2 K_hat / L",
            f"  label rows  min {rows['min']:,}, median {rows['median']:,g}, mean {rows['mean']:,.4g}, "
            f"max {rows['max']:,}; {rows['labels_without_row']:,} labels without a row",
        ]
    if found["p0_note"]:
        lines.insert(6, f"              note: {found['p0_note']}")
    for name, array in found["arrays"].items():
        shards = f" in shards of {array['shards']}" if array["shards"] else ""
        lines.append(
            f"  array       {name}: {array['dtype']} {array['shape']} in chunks of {array['chunks']}{shards}"
        )
    return lines


def _dataset(store: str, options: Mapping[str, Any]) -> tuple[Description, Callable[[], list[str]]]:
    from dswml.dataset import open_dataset

    found = describe_dataset(open_dataset(store, storage_options=options))
    return found, lambda: dataset_lines(found)


def describe_model(model: Model, url: str) -> Description:
    """Return what a model is and how its fit went."""
    return {
        "kind": "model",
        "url": url,
        "n_features": model.n_features,
        "n_labels": model.n_labels,
        "rank": model.rank,
        "p0": model.p0,
        "loss": model.loss,
        "rule": str(model.rule),
        "threshold": model.threshold,
        "label_thresholds": model.label_thresholds is not None,
        "top_k": model.top_k,
        "normalize": model.normalize,
        "intercept": model.intercept,
        "label_counts": model.label_counts is not None,
        "label_names": model.label_names is not None,
        "feature_names": model.feature_names is not None,
        **model.info,
    }


def model_lines(found: Mapping[str, Any]) -> list[str]:
    """Write a description of `describe_model` for people."""
    lines = [
        f"{found['url']}: model",
        f"  features    {found['n_features']:,}, rows {_scaling(found['normalize'])}, "
        f"intercept {found['intercept']:g}",
        f"  labels      {found['n_labels']:,}, predicted: {found['rule']}",
        f"  rank        {found['rank']}",
        f"  loss        {found['loss']}, p0 = {found['p0']:.4g}",
    ]
    if "objective" in found:
        certified = found.get("certificate")
        kind = f"certified ({certified['method']})" if certified else "estimated"
        lines += [
            f"  radius      {found['parameters']['radius']:g}",
            f"  objective   {found['objective']:.6g}, relative gap {found['relative_gap']:.2g} {kind}",
            f"  fit         {found['status']} after {found['iterations']} iterations, "
            f"{found['passes']} passes, {found['seconds']:.1f} s",
            f"  data        {found['data']['n_rows']:,} rows, fingerprint "
            f"{found['data']['fingerprint'][:16]}",
            "  versions    " + ", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        ]
    return lines


def _model(store: str, options: Mapping[str, Any]) -> tuple[Description, Callable[[], list[str]]]:
    from dswml.model import load_model

    found = describe_model(load_model(store, storage_options=options), store)
    return found, lambda: model_lines(found)


def describe_prediction(store: str, options: Mapping[str, Any]) -> Description:
    """Return what is known of the predictions in a store without reading them."""
    from dswml.csr import CsrGroup
    from dswml.errors import IncompleteStoreError
    from dswml.storage import open_group

    group = open_group(store, "r", options)
    attrs: dict[str, Any] = dict(group.attrs)
    if attrs.get("complete") is not True:
        raise IncompleteStoreError(
            f"the prediction {store} was interrupted: go on with 'dswml predict ... --resume'"
        )
    n_rows, n_labels = attrs["shape"]
    matrix = CsrGroup.open(group, "", n_rows, n_labels, store)
    return {
        "kind": "prediction",
        "url": store,
        "n_rows": n_rows,
        "n_labels": n_labels,
        "n_predicted": matrix.indices.shape[0],
        "values": "scores" if attrs["request"]["scores"] else "ones",
        "rule": attrs["rule"],
        "label_names": "label_names" in group,
        "model": attrs["request"]["model"],
        "data": attrs["request"]["data"],
    }


def _prediction(store: str, options: Mapping[str, Any]) -> tuple[Description, Callable[[], list[str]]]:
    found = describe_prediction(store, options)
    return found, lambda: [
        f"{found['url']}: predictions",
        f"  rows        {found['n_rows']:,}",
        f"  labels      {found['n_labels']:,}, predicted: {found['rule']}",
        f"  entries     {found['n_predicted']:,} {found['values']}, "
        f"{found['n_predicted'] / found['n_rows']:.4g} a row",
        f"  model       fingerprint {found['model'][:16]}",
        f"  data        fingerprint {found['data'][:16]}",
    ]


def describe_checkpoint(store: str, options: Mapping[str, Any]) -> Description:
    """Return what the newest checkpoint in a folder is of, and how far it is."""
    from dswml.checkpoint_file import newest_checkpoint
    from dswml.errors import IncompleteStoreError

    found = newest_checkpoint(store, options)
    if found is None:
        raise IncompleteStoreError(f"{store} holds no checkpoint yet: the work begins from the start")
    values = found.values
    return {
        "kind": "checkpoint",
        "url": store,
        "number": found.number,
        "iterations": values.get("iteration", 0),
        "directions": sum(sum(value) for name, value in values.items() if name.endswith("pieces")),
        "reads_since": len(values["reads"]),
        "seconds": values["seconds"],
        "nbytes": sum(value.nbytes for value in values.values() if hasattr(value, "nbytes")),
        "objective": values.get("objective"),
        "request": found.request,
    }


def _checkpoint(store: str, options: Mapping[str, Any]) -> tuple[Description, Callable[[], list[str]]]:
    from dswml.progress import format_seconds

    found = describe_checkpoint(store, options)
    request = {name: value for name, value in found["request"].items() if value is not None}
    verb, data = request.pop("verb"), request.pop("data")
    lines = [
        f"{found['url']}: checkpoint {found['number']} of dswml {verb}",
        f"  state       {found['iterations']} iterations, reads since the last: {found['reads_since']}, "
        f"{format_seconds(found['seconds'])}",
        f"  size        {found['nbytes'] / 2**20:,.1f} MiB, {found['directions']} directions",
        f"  data        fingerprint {data[:16]}",
        "  parameters  " + ", ".join(f"{name} {value}" for name, value in request.items()),
    ]
    if found["objective"] is not None:
        lines.insert(2, f"  objective   {found['objective']:.6g}")
    return found, lambda: lines


#: What the root attribute ``format`` of a store says it is -> its description, and the same for people.
_KINDS = {
    "dswml-checkpoints": _checkpoint,
    "dswml-dataset": _dataset,
    "dswml-model": _model,
    "dswml-prediction": _prediction,
}


@click.command()
@click.argument("store")
@verb_options
def info(store: str, as_json: bool, quiet: bool, storage_options: dict[str, Any]) -> None:
    """Tell what is in a store.

    STORE is the path or URL of a data set (shown: shape, chunks, sparsity, K_hat, p0, label frequencies), of
    a model (shown: shape, rank, weights, and how its fit went), of predictions (shown: shape, and of what) or
    of a folder of checkpoints (shown: of what, and how far).
    """
    from dswml.storage import open_group

    describe = _KINDS.get(str(open_group(store, "r", storage_options).attrs.get("format")), _dataset)
    with telling(f"the attributes of {store} are damaged"):
        found, lines = describe(store, storage_options)
        told = json.dumps(found) if as_json else "\n".join(lines())
    click.echo(told)
