"""A Slurm and an SSH server of one node on loopback, each with everything it has in a folder of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

LOOPBACK = "127.0.0.1"
DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
#: The environment of this interpreter comes first, so that commands are those of the tests.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])

SLURM = """\
ClusterName=test
SlurmctldHost={host}({loopback})
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ctld}
SlurmdPort={slurmd}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
NodeName={host} NodeAddr={loopback} CPUs=4 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES State=UP
"""
SSHD = """\
ListenAddress {loopback}:{port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/sshd.pid
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
SSH = """\
Host *
  Port {port}
  User {user}
  IdentityFile {folder}/user
  UserKnownHostsFile {folder}/known
"""


def program(name: str, package: str) -> str:
    """Return the path of a program; a test that needs it is skipped where it is missing."""
    found = shutil.which(name, path=PATH)
    if found is None:
        pytest.skip(f"{name} is not installed: it comes with Debian's package {package}")
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


def wait_for(what: Callable[[], bool], seconds: float, told: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, told()
        time.sleep(0.5)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it has started."""
    alive = [*psutil.Process(process.pid).children(recursive=True), process]
    for one in alive:
        one.terminate()
    process.wait(timeout=30)


@contextmanager
def slurm(folder: Path) -> Iterator[Mapping[str, str]]:
    """Start munge, a controller and a node of Slurm; yield the environment of its commands."""
    daemons = {name: program(name, "slurm-wlm") for name in ("slurmctld", "slurmd")}
    daemons = {"munged": program("munged", "munge"), **daemons}
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    ports = {"ctld": free_port(), "slurmd": free_port()}
    conf = folder / "slurm.conf"
    conf.write_text(
        SLURM.format(host=host, loopback=LOOPBACK, user=getpass.getuser(), folder=folder, **ports)
    )
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "seed"}
    options = {
        "munged": [
            "--force",
            "--foreground",
            *(f"--{option}={folder / file}" for option, file in files.items()),
        ],
        "slurmctld": ["-D", "-f", str(conf)],
        "slurmd": ["-D", "-f", str(conf)],
    }
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(conf)}
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("wb"))
        for name, path in daemons.items():
            started = subprocess.Popen([path, *options[name]], stdout=log, stderr=log, env=environment)
            stack.callback(end, started)
        wait_for(
            lambda: "idle" in run("sinfo", "-h", "-o", "%T", env=environment).stdout,
            60,
            (folder / "log").read_text,
        )
        yield environment


@contextmanager
def sshd(folder: Path) -> Iterator[Mapping[str, str]]:
    """Start an SSH server; yield an environment in which ssh to loopback arrives at it."""
    server = program("sshd", "openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # a server of root wants it, and has nothing in it
    home = folder / "home"
    (home / ".ssh").mkdir(parents=True)
    for name in ("host", "user"):
        run(program("ssh-keygen", "openssh-client"), "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    port = free_port()
    (folder / "known").write_text(f"[{LOOPBACK}]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(SSHD.format(loopback=LOOPBACK, port=port, folder=folder))
    (home / ".ssh" / "config").write_text(SSH.format(port=port, user=getpass.getuser(), folder=folder))
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen([server, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
        try:
            yield {**os.environ, "PATH": PATH, "HOME": str(home)}
        finally:
            end(started)
