"""deploy/: what it starts does start, under the real programs where they are, closed to strangers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from deploy_cases import DEPLOY, LOOPBACK, PATH, end, free_port, program, run, slurm, sshd, wait_for
from distributed.cli.dask_scheduler import main as dask_scheduler
from distributed.cli.dask_worker import main as dask_worker

from dswml import load_model
from dswml.cli import VERBS, cli
from dswml.synth import synthesize

CHECKOUT = DEPLOY.parent
PAGES = sorted(DEPLOY.rglob("README.md"))
DASK = {"scheduler": dask_scheduler, "worker": dask_worker}
CERTIFICATE = ["-subj", "/CN=dswml", "-keyout", "key.pem", "-out", "cert.pem"]


def understood(words: list[str]) -> None:
    """Let the program that the words begin with take its options."""
    if words[0] == "dask":
        DASK[words[1]].make_context(words[1], list(words[2:]))
        return
    assert words[0] == "dswml"
    assert words[1] in VERBS
    command = cli.get_command(click.Context(cli), words[1])
    assert command is not None
    command.make_context(words[1], list(words[2:]))


def same_bits(one: Path, other: Path) -> bool:
    ours, theirs = load_model(one), load_model(other)
    return (ours.u.tobytes(), ours.m.tobytes()) == (theirs.u.tobytes(), theirs.m.tobytes())


def test_every_folder_has_a_page_and_the_first_page_leads_to_it() -> None:
    folders = {path.name for path in DEPLOY.iterdir() if path.is_dir()}
    assert folders == {"docker", "kubernetes", "slurm", "ssh"}
    first = (DEPLOY / "README.md").read_text()
    for name in folders:
        assert f"({name}/README.md)" in first
        assert (DEPLOY / name / "README.md").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_commands_of_the_pages_are_understood(page: Path) -> None:
    blocks = "".join(re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.DOTALL)).replace("\\\n", " ")
    lines = re.findall(
        rf"(?:^|-- |dswml\.sbatch |run --rm dswml )(?:dswml )?((?:{'|'.join(VERBS)}) .*)",
        blocks,
        re.MULTILINE,
    )
    assert lines
    for line in lines:
        understood(["dswml", *shlex.split(line, comments=True)])


def test_files_name_no_home_and_no_host() -> None:
    for path in DEPLOY.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert not re.search(r"/home/|/root|pypi", path.read_text()), path


# Slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Mapping[str, str]]:
    # A short path, as sockets need.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, slurm(Path(folder)) as environment:
        yield environment


def submit(environment: Mapping[str, str], folder: Path, *words: str) -> str:
    """Hand the batch script to Slurm with one worker and return the job's id."""
    small = ["--ntasks=2", "--cpus-per-task=1", "--mem-per-cpu=1G", "--time=1", "--signal=B:USR1@1"]
    told = run(
        "sbatch", "--parsable", *small, DEPLOY / "slurm" / "dswml.sbatch", *words, cwd=folder, env=environment
    )
    assert told.returncode == 0, told.stderr
    return str(told.stdout.strip())


def shown(environment: Mapping[str, str], job: str) -> dict[str, str]:
    told = run("scontrol", "show", "job", job, env=environment).stdout
    return dict(word.split("=", 1) for word in told.split() if "=" in word)


def test_the_batch_script_is_bash() -> None:
    script = DEPLOY / "slurm" / "dswml.sbatch"
    assert run("bash", "-n", script).returncode == 0
    if shutil.which("shellcheck"):
        assert run("shellcheck", "--severity=warning", script).stdout == ""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_slurm_job_meets_its_time_limit_and_finishes_by_itself(
    cluster: Mapping[str, str], tmp_path: Path
) -> None:
    synthesize(tmp_path / "data.zarr", rows=60000, features=200, labels=100, sparsity=6)
    fit = ["train", "data.zarr", "--radius", "60", "--step", "line-search", "--tol", "0", "--cache", "none"]
    dswml = [sys.executable, "-c", "from dswml.cli import main; main()"]
    # More than a minute of work, on whatever machine this is.
    plain = ["--model", "plain.zarr", "--workers", "1", "--threads", "1", "--time-limit", "60"]
    assert run(*dswml, *fit, *plain, cwd=tmp_path).returncode == 0
    steps = str(load_model(tmp_path / "plain.zarr").info["iterations"])

    safe = ["--model", "model.zarr", "--max-iter", steps, "--checkpoint", "run", "--resume"]
    job = submit(cluster, tmp_path, *fit, *safe)
    log = tmp_path / f"dswml-{job}.log"
    wait_for(
        lambda: shown(cluster, job)["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT"), 1000, log.read_text
    )
    told = shown(cluster, job)
    assert (told["JobState"], told["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    assert int(told["Restarts"]) >= 1
    assert "Going on from checkpoint" in log.read_text()
    assert "tls://" in log.read_text()
    assert "tcp://" not in log.read_text()
    assert same_bits(tmp_path / "plain.zarr", tmp_path / "model.zarr")
    assert not (tmp_path / f"dswml-{job}").exists()  # nor the key that was in it


@pytest.mark.slow
def test_a_slurm_job_that_is_cancelled_does_not_come_back(cluster: Mapping[str, str], tmp_path: Path) -> None:
    synthesize(tmp_path / "data.zarr", rows=20000, features=50, labels=50, sparsity=4)
    endless = [
        "--step",
        "open-loop",
        "--tol",
        "0",
        "--max-iter",
        "1000000",
        "--checkpoint",
        "run",
        "--resume",
    ]
    job = submit(cluster, tmp_path, "train", "data.zarr", "--model", "model.zarr", *endless)
    log = tmp_path / f"dswml-{job}.log"
    wait_for(
        lambda: log.exists() and "iteration   1 " in log.read_text(), 120, lambda: str(shown(cluster, job))
    )
    assert run("scancel", job, env=cluster).returncode == 0
    wait_for(lambda: run("squeue", "-h", env=cluster).stdout == "", 60, log.read_text)
    assert (shown(cluster, job)["JobState"], shown(cluster, job)["Restarts"]) == ("CANCELLED", "0")


@pytest.mark.slow
def test_a_slurm_job_with_bad_data_has_failed_with_the_exit_code(
    cluster: Mapping[str, str], tmp_path: Path
) -> None:
    job = submit(cluster, tmp_path, "train", "nothing.zarr", "--model", "model.zarr")
    wait_for(lambda: shown(cluster, job)["JobState"] == "FAILED", 120, lambda: str(shown(cluster, job)))
    assert shown(cluster, job)["ExitCode"] == "3:0", (tmp_path / f"dswml-{job}.log").read_text()


@pytest.mark.slow
def test_dask_jobqueue_trains_on_slurm(cluster: Mapping[str, str], tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue")
    synthesize(tmp_path / "data.zarr", rows=2000, features=20, labels=30, sparsity=4)
    small = ["--jobs", "2", "--cores", "1", "--memory", "1 GiB", "--walltime", "00:05:00", "--radius", "20"]
    script = DEPLOY / "slurm" / "jobqueue.py"
    home = {**cluster, "HOME": str(tmp_path)}
    told = run(sys.executable, script, "data.zarr", "model.zarr", *small, cwd=tmp_path, env=home)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("OPTIMAL ")
    assert load_model(tmp_path / "model.zarr").info["iterations"] >= 1


# SSH


@pytest.mark.slow
def test_hosts_train_that_are_reached_by_ssh(tmp_path: Path) -> None:
    pytest.importorskip("asyncssh")
    synthesize(tmp_path / "data.zarr", rows=2000, features=20, labels=30, sparsity=4)
    openssl = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *CERTIFICATE]
    assert run(program("openssl", "openssl"), "req", *openssl, cwd=tmp_path).returncode == 0
    hosts = [*("--tls", "."), *[LOOPBACK] * 3]
    with sshd(tmp_path) as environment:
        for store, code in (("data.zarr", 0), ("nothing.zarr", 3)):
            verb = ["train", store, "--model", "model.zarr", "--radius", "20", "--overwrite"]
            script = DEPLOY / "ssh" / "dswml_ssh.py"
            told = run(sys.executable, script, *hosts, "--", *verb, cwd=tmp_path, env=environment)
            assert told.returncode == code, told.stderr
            assert "tls://" in told.stderr
            assert "tcp://" not in told.stderr
    assert load_model(tmp_path / "model.zarr").info["iterations"] >= 1


# Kubernetes


def manifest(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()))


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    standing, job = manifest("cluster")["spec"], manifest("job")["spec"]
    for name, spec in (("cluster", standing), ("job", job["cluster"]["spec"])):
        for role in ("scheduler", "worker"):
            yield f"{name}-{role}", spec[role]["spec"]
    yield "job-driver", job["job"]["spec"]


@pytest.mark.parametrize("pod", [pytest.param(pod, id=name) for name, pod in pods()])
def test_pods_are_bounded_unprivileged_and_show_certificates(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert not pod["automountServiceAccountToken"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == [
        "dswml-tls"
    ]
    files = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--tls-")]
    assert files == [f"{mounts['tls']}/tls.{kind}" for kind in ("crt", "crt", "key")]
    assert not any("tcp://" in arg for arg in container["args"])


@pytest.mark.parametrize("pod", [pytest.param(pod, id=name) for name, pod in pods()])
def test_arguments_of_the_pods_are_understood(pod: dict[str, Any], tmp_path: Path) -> None:
    for kind in ("crt", "key"):
        (tmp_path / f"tls.{kind}").touch()
    understood([arg.replace("/tls/", f"{tmp_path}/") for arg in pod["containers"][0]["args"]])


def strict(schema: Any) -> Any:
    """Refuse properties that a schema does not know, which Kubernetes drops without a word."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


@pytest.mark.slow
def test_manifests_fit_the_schemas_of_the_dask_operator(tmp_path: Path) -> None:
    got = run(
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "dask-kubernetes", cwd=tmp_path
    )
    if got.returncode != 0:
        pytest.skip("the package dask-kubernetes, which has the schemas, cannot be had from here")
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        for name, kind in (("cluster", "daskcluster"), ("job", "daskjob")):
            (path,) = (path for path in packed.namelist() if path.endswith(f"/crds/{kind}.yaml"))
            definition = yaml.safe_load(packed.read(path))["spec"]
            document = manifest(name)
            (version,) = definition["versions"]
            assert document["apiVersion"] == f"{definition['group']}/{version['name']}"
            assert document["kind"] == definition["names"]["kind"]
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"] |= {"metadata": {}, "apiVersion": {}, "kind": {}}
            jsonschema.validate(document, schema)
            document["spec"]["surprise"] = 1
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(document, schema)


# Docker

DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()


def services() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"])


def test_the_image_is_pinned_has_no_compiler_and_no_root() -> None:
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(set(stages)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", stages[0])
    assert not re.search(r"apt-get|gcc|ADD |curl|sudo", DOCKERFILE)
    users = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert users == ["10001"]
    for source in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((CHECKOUT / path).exists() for path in source.split())


def test_compose_publishes_on_loopback_alone_and_watches_its_services() -> None:
    found = services()
    assert found["worker"]["deploy"]["replicas"] == 2
    for name, service in found.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert "mem_limit" in service
        assert "no-new-privileges:true" in service["security_opt"]
        assert re.search(r":[^:]*\d", service["image"])
        assert ("healthcheck" in service) == (name != "dswml")
        assert not service.get("privileged")
    understood(found["scheduler"]["command"])
    understood(found["worker"]["command"])


def test_compose_is_accepted_by_its_own_program() -> None:
    compose = program("docker-compose", "docker-compose")
    file = DEPLOY / "docker" / "compose.yaml"
    accepted = run(
        compose, "-f", file, "config", "--quiet", env={**os.environ, "STORE_SECRET": "long enough"}
    )
    assert accepted.returncode == 0, accepted.stderr
    unset = {name: value for name, value in os.environ.items() if name != "STORE_SECRET"}
    refused = run(compose, "-f", file, "config", "--quiet", env=unset)
    assert refused.returncode != 0
    assert "STORE_SECRET" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_image_installs_runs_the_services(tmp_path: Path) -> None:
    venv.create(tmp_path / "image", with_pip=True)
    shutil.copytree(CHECKOUT / "dswml", tmp_path / "src" / "dswml")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(CHECKOUT / name, tmp_path / "src")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{tmp_path / 'image' / 'bin'}{os.pathsep}{PATH}"
    installs = re.findall(r"pip (?:wheel|install) .*", DOCKERFILE)
    assert len(installs) == 2
    for line in installs:
        command = line.removesuffix("\\").replace("/wheels", str(tmp_path / "wheels"))
        told = run("bash", "-c", command, cwd=tmp_path / "src", env=environment)
        assert told.returncode == 0, told.stderr
    version = run("dswml", "--version", cwd=tmp_path, env=environment)
    assert version.returncode == 0, version.stderr

    address, health = f"{LOOPBACK}:{free_port()}", {"scheduler": free_port(), "worker": free_port()}
    synthesize(tmp_path / "data.zarr", rows=500, features=10, labels=40, sparsity=4)
    started: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "log").open("wb") as log:
        try:
            for name in ("scheduler", "worker"):
                service = services()[name]
                command = [
                    word.replace("scheduler:8786", address)
                    .replace("8786", address.partition(":")[2])
                    .replace(":8787", f"{LOOPBACK}:{health[name]}")
                    for word in service["command"]
                ] + ["--host", LOOPBACK]
                started.append(
                    subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
                )
                check = [
                    word.replace("8787", str(health[name])) for word in service["healthcheck"]["test"][1:]
                ]
                healthy = partial(run, *check, env=environment)
                wait_for(lambda h=healthy: h().returncode == 0, 60, (tmp_path / "log").read_text)  # type: ignore[misc]
            train = ["train", "data.zarr", "--model", "model.zarr", "--scheduler", f"tcp://{address}"]
            told = run("dswml", *train, cwd=tmp_path, env=environment)
            assert told.returncode == 0, told.stderr
        finally:
            for process in reversed(started):
                end(process)


# Sizes


@pytest.mark.slow
def test_the_example_of_the_page_on_sizes_is_what_the_command_says(tmp_path: Path) -> None:
    page = (DEPLOY / "README.md").read_text()
    (commands,) = re.findall(r"```sh\n(dswml synth .*?)```", page, re.DOTALL)
    (told,) = re.findall(r"```text\n(row blocks .*?)```", page, re.DOTALL)
    said = run("bash", "-ec", commands, cwd=tmp_path, env={**os.environ, "PATH": PATH})
    assert said.returncode == 0, said.stderr
    plan = said.stdout[said.stdout.index("row blocks   ") :]
    assert plan.splitlines()[:-1] == told.splitlines()[:-1]  # the last line is the time
