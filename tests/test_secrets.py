"""Keys of object stores and of certificates: no verb writes them anywhere or repeats them in an error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner
from distributed import Client, Security
from job_cases import far_cluster
from s3_cases import free_port, s3_server
from test_tls import certify

import dswml
from dswml.cli import cli
from dswml.jobs import all_jobs

#: The key, the secret and the token that must be found nowhere.
KEYS = {"key": "AKIAOPENSESAME", "secret": "wJalrXUtnFEMI/K7MDENG", "token": "FwoGZXIvYXdzEBYa+b"}
SIZE = ["--rows", "200", "--features", "6", "--labels", "20", "--sparsity", "3"]
TRAIN = ["--radius", "5", "--max-iter", "2", "--tol", "0"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server with a bucket."""
    with s3_server(tmp_path_factory.mktemp("moto")) as address:
        fsspec.filesystem("s3", endpoint_url=address, **KEYS).mkdir("bucket")
        yield address


def options(server: str) -> list[str]:
    pairs = {"endpoint_url": server, **KEYS}
    return [word for key, value in pairs.items() for word in ("-o", f"{key}={value}")]


def said(code: int, *arguments: str) -> str:
    """Run a command that must end with this exit code; return all that it says."""
    told = CliRunner().invoke(cli, [*arguments, "--debug"], prog_name="dswml")
    assert told.exit_code == code, told.output
    return str(told.output)


def written(server: str, folder: Path) -> str:
    """Return the content of every object in the bucket and of every file in the folder, and their names."""
    fs: Any = fsspec.filesystem("s3", endpoint_url=server, **KEYS)
    fs.invalidate_cache()
    objects = [f"{name} {fs.cat_file(name).decode('latin-1')}" for name in fs.find("bucket")]
    files = [f"{file} {file.read_text('latin-1')}" for file in folder.rglob("*") if file.is_file()]
    assert objects
    assert files
    return "".join([*objects, *files])


def test_no_verb_writes_or_repeats_the_keys_of_an_object_store(server: str, tmp_path: Path) -> None:
    keys, b, here = options(server), "s3://bucket", os.fspath(tmp_path)
    text = tmp_path / "tiny.txt"
    text.write_text("3 4 2\n0,1 0:1 3:0.5\n 2:1\n1 1:2\n")
    output = [
        said(0, "synth", f"{b}/a.zarr", *SIZE, *keys),
        said(0, "import", os.fspath(text), f"{b}/tiny.zarr", *keys),
        said(0, "validate", f"{b}/a.zarr", *keys),
        said(0, "info", f"{b}/a.zarr", "--json", *keys),
        said(
            5,
            *("train", f"{b}/a.zarr", "--model", f"{b}/m.zarr", "--checkpoint", f"{b}/run", *TRAIN),
            *("--time-limit", "0.000001", *keys),
        ),
        said(
            0,
            *("train", f"{b}/a.zarr", "--model", f"{b}/m.zarr", "--checkpoint", f"{b}/run", *TRAIN),
            *("--resume", *keys),
        ),
        said(0, "tune", f"{b}/a.zarr", "--model", f"{b}/t.zarr", "--radii", "2,5", "--folds", "2", *keys),
        said(0, "info", f"{b}/t.zarr", "--json", *keys),
        said(0, "predict", f"{b}/m.zarr", f"{b}/a.zarr", f"{b}/y.zarr", "--top-k", "2", *keys),
        said(0, "predict", f"{b}/m.zarr", f"{b}/a.zarr", f"{here}/y.csv", "--format", "csv", *keys),
        said(0, "evaluate", f"{b}/m.zarr", f"{b}/a.zarr", "--json", *keys),
        said(0, "report", f"{b}/t.zarr", f"{here}/report.html", "--data", f"{b}/a.zarr", *keys),
        # What goes wrong.
        said(3, "info", f"{b}/none.zarr", *keys),
        said(2, "train", f"{b}/a.zarr", "--model", f"{b}/m.zarr", *keys),
        said(2, "info", f"{b}/a.zarr", "-o", f"secret:{KEYS['secret']}"),
        said(3, "info", f"{b}/a.zarr", *keys, "-o", f"client_kwargs={KEYS['token']}"),
        said(
            3,
            *("info", f"{b}/a.zarr", *keys, "-o", f"endpoint_url=http://127.0.0.1:{free_port()}"),
            *("-o", 'config_kwargs={"retries": {"max_attempts": 0}}'),
        ),
    ]
    everything = "".join(output) + written(server, tmp_path)
    assert "dswml train" in everything
    assert [name for name, value in KEYS.items() if value in everything] == []


@pytest.mark.slow
def test_neither_do_jobs_nor_tell_they_the_keys_of_certificates(
    server: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A job that is done and one that fails, on a cluster under TLS."""
    safe = tmp_path_factory.mktemp("certificates")
    certify(safe, "node", certify(safe, "authority"))
    files = [os.fspath(safe / name) for name in ("authority.crt", "node.crt", "node.key")]
    names = ("--tls-ca-file", "--tls-cert", "--tls-key")
    shown = [word for pair in zip(names, files, strict=True) for word in pair]
    keys, b = options(server), "s3://bucket/jobs"
    output = [said(0, "synth", f"{b}/a.zarr", *SIZE, *keys)]
    security = Security(
        tls_ca_file=files[0], tls_client_cert=files[1], tls_client_key=files[2], require_encryption=True
    )
    with far_cluster(tmp_path, workers=1, scheme="tls", options=shown) as cluster:
        there = ["--scheduler", cluster.address, *(word.replace("-file", "") for word in shown)]
        for job, model, code in (("one", "m.zarr", 0), ("two", "m.zarr", 2)):
            words = ["train", f"{b}/a.zarr", "--model", f"{b}/{model}", *TRAIN, *keys]
            output.append(said(0, "submit", "--name", job, *words, *there))
            output.append(said(code, "result", job, "--wait", *there))
            output += [said(0, verb, job, *there) for verb in ("logs", "status")]
        output.append(said(0, "jobs", "--json", *there))
        with Client(cluster.address, security=security, set_as_default=False) as client:
            output.append(repr([all_jobs(client), dswml.Job(client, "two").logs()]))
            client.dump_cluster_state(os.fspath(tmp_path / "state"), format="yaml")
    everything = "".join(output) + written(server, tmp_path)
    assert "exists" in everything
    assert [name for name, value in KEYS.items() if value in everything] == []
    for line in Path(files[2]).read_text().splitlines()[1:-1]:
        assert line not in everything
