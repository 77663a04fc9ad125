"""Runs a verb of dswml on hosts that can be reached by SSH, and ends with the verb's exit code.

The first host gets the scheduler, the others a worker each; a host may be named more than once.
"""

import argparse
import os
import signal
import subprocess
import sys

import dask
from dask.distributed import SSHCluster

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [OPTIONS] HOST HOST... -- VERB ARGUMENTS..."
    )
    parser.add_argument("hosts", nargs="+", metavar="HOST")
    parser.add_argument("--tls", metavar="DIR", help="cert.pem and key.pem, in this folder on every host")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker")
    parser.add_argument("--memory-limit", default="auto", help="memory of each worker; see dswml plan")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with dswml on the hosts")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, verb = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if len(options.hosts) < 2 or not verb:
        parser.error("name two hosts or more and, after --, a verb of dswml")

    scheme = "tcp"
    if options.tls:
        cert, key = (os.path.abspath(os.path.join(options.tls, name)) for name in ("cert.pem", "key.pem"))
        dask.config.set({"distributed.comm.require-encryption": True, "distributed.comm.tls.ca-file": cert})
        for role in ("scheduler", "worker", "client"):
            dask.config.set(
                {f"distributed.comm.tls.{role}.cert": cert, f"distributed.comm.tls.{role}.key": key}
            )
        verb += ["--tls-ca", cert, "--tls-cert", cert, "--tls-key", key, "--require-tls"]
        scheme = "tls"
    with SSHCluster(
        options.hosts,
        scheduler_options={"protocol": scheme, "port": 0, "dashboard_address": "127.0.0.1:0"},
        worker_options={
            "protocol": scheme,
            "nthreads": options.threads,
            "memory_limit": options.memory_limit,
            "dashboard_address": "127.0.0.1:0",
        },
        remote_python=options.python,
    ) as cluster:
        driver = subprocess.Popen(
            [sys.executable, "-c", "from dswml.cli import main; main()", *verb],
            env={**os.environ, "DASK_SCHEDULER_ADDRESS": cluster.scheduler_address},
            start_new_session=True,  # Ctrl-C reaches it once, from here
        )
        for stop in (signal.SIGINT, signal.SIGTERM):  # the verb ends in good order, then the cluster
            signal.signal(stop, lambda number, frame: driver.send_signal(number))
        code = driver.wait()
    sys.exit(code)
