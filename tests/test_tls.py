"""Certificates: the right ones are let in, wrong ones and none are a sentence, and plain tcp is told of."""

from __future__ import annotations

import datetime
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from job_cases import FarCluster, far_cluster

from dswml.cli import cli
from dswml.cluster import ClusterOptions, client_from_options
from dswml.errors import ClusterError
from dswml.synth import synthesize

Signed = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def certify(folder: Path, name: str, issuer: Signed | None = None) -> Signed:
    """Write NAME.crt and NAME.key, of an authority or certified by one."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer[0].subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(key if issuer is None else issuer[1], hashes.SHA256())
    )
    (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, key


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for authority, node in (("authority", "node"), ("forger", "stranger")):
        certify(folder, node, certify(folder, authority))
    return folder


def shown(folder: Path, authority: str, node: str) -> list[str]:
    return [
        *("--tls-ca", os.fspath(folder / f"{authority}.crt")),
        *("--tls-cert", os.fspath(folder / f"{node}.crt")),
        *("--tls-key", os.fspath(folder / f"{node}.key")),
    ]


@pytest.fixture(scope="module")
def tls_cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[FarCluster]:
    options = [
        *("--tls-ca-file", os.fspath(certificates / "authority.crt")),
        *("--tls-cert", os.fspath(certificates / "node.crt")),
        *("--tls-key", os.fspath(certificates / "node.key")),
    ]
    with far_cluster(tmp_path_factory.mktemp("cluster"), workers=1, scheme="tls", options=options) as cluster:
        yield cluster


def dswml(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="dswml")


@pytest.mark.slow
def test_a_job_runs_from_end_to_end_under_tls(
    tls_cluster: FarCluster, certificates: Path, tmp_path: Path
) -> None:
    synthesize(tmp_path / "a.zarr", rows=500, features=10, labels=40, sparsity=4)
    there = ["--scheduler", tls_cluster.address, *shown(certificates, "authority", "node"), "--require-tls"]
    assert tls_cluster.address.startswith("tls://")
    model = os.fspath(tmp_path / "model.zarr")
    handed = dswml("submit", *there, "train", os.fspath(tmp_path / "a.zarr"), "--model", model)
    assert handed.exit_code == 0, handed.stderr
    told = dswml("result", handed.stdout.strip(), "--wait", *there)
    assert told.exit_code == 0, told.stderr
    assert "OPTIMAL" in told.stdout


@pytest.mark.parametrize(
    ("authority", "node", "sentence"),
    [
        ("forger", "node", "certificate verify failed"),
        ("authority", "stranger", "the certificates"),  # the scheduler closes, with a reason or without
        (None, None, "wants to see a certificate: give --tls-ca"),
    ],
)
def test_wrong_certificates_and_none_are_a_sentence_within_seconds(
    tls_cluster: FarCluster, certificates: Path, authority: str | None, node: str | None, sentence: str
) -> None:
    given = [] if authority is None or node is None else shown(certificates, authority, node)
    started = time.monotonic()
    told = dswml("jobs", "--scheduler", tls_cluster.address, *given)
    assert time.monotonic() - started < 30
    assert told.exit_code == 4
    assert tls_cluster.address in told.stderr
    assert sentence in told.stderr


def test_plain_tcp_to_a_scheduler_under_tls_is_a_sentence(
    tls_cluster: FarCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dswml.cluster.CONNECT_SECONDS", 2.0)
    told = dswml("jobs", "--scheduler", tls_cluster.address.replace("tls://", "tcp://"))
    assert told.exit_code == 4
    assert "cannot be reached" in told.stderr


def test_certificates_of_dasks_own_configuration_are_shown(
    tls_cluster: FarCluster, certificates: Path
) -> None:
    import dask

    tls = {
        "distributed.comm.tls.ca-file": os.fspath(certificates / "authority.crt"),
        "distributed.comm.tls.client.cert": os.fspath(certificates / "node.crt"),
        "distributed.comm.tls.client.key": os.fspath(certificates / "node.key"),
    }
    with dask.config.set(tls):
        assert dswml("jobs", "--scheduler", tls_cluster.address).exit_code == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--scheduler", "tcp://127.0.0.1:9", "--require-tls"], "--require-tls refuses any other"),
        (["--tls-ca", "authority.crt"], "give --tls-cert and --tls-key too"),
        (["--tls-ca", "a", "--tls-cert", "b", "--tls-key", "c"], "--tls-ca a is not a file"),
        (
            ["--tls-ca", "authority.crt", "--tls-cert", "node.crt", "--tls-key", "stranger.key"],
            "cannot be used",
        ),
    ],
)
def test_what_cannot_be_meant_is_wrong_usage(
    certificates: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], sentence: str
) -> None:
    monkeypatch.chdir(certificates)
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://127.0.0.1:9")
    told = dswml("jobs", *options)
    assert told.exit_code == 2
    assert sentence in told.stderr


def test_plain_tcp_across_a_network_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dswml.cluster.CONNECT_SECONDS", 0.2)
    address = f"tcp://{socket.gethostname()}:9"
    with (
        pytest.warns(UserWarning, match="can be read and changed by anybody on the way"),
        pytest.raises(ClusterError),
        client_from_options(ClusterOptions(scheduler=address)),
    ):
        pass
