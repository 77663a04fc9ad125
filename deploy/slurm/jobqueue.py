"""Trains on workers that dask-jobqueue asks Slurm for; this process, on a login node, leads them."""

import argparse

from dask.distributed import Client
from dask_jobqueue import SLURMCluster

import dswml

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--jobs", type=int, default=4, help="Slurm jobs, one worker each")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--memory", default="4 GiB", help="of a worker; see dswml plan")
    parser.add_argument("--walltime", default="04:00:00", help="of a job; those that end are replaced")
    parser.add_argument("--radius", type=float, default=100.0)
    parser.add_argument("--checkpoint", default="checkpoint", help="folder to go on from next time")
    options = parser.parse_args()

    with (
        SLURMCluster(
            processes=1,
            cores=options.cores,
            memory=options.memory,
            walltime=options.walltime,
            security=True,  # certificates for this cluster alone, in the home directory
            shared_temp_directory="~",
            scheduler_options={"dashboard_address": "127.0.0.1:0"},
        ) as cluster,
        Client(cluster) as client,
    ):
        cluster.adapt(minimum_jobs=options.jobs, maximum_jobs=options.jobs)
        client.wait_for_workers(1)
        classifier = dswml.SparseWeightedClassifier(
            radius=options.radius, checkpoint=dswml.Checkpoints(options.checkpoint, resume=True)
        )
        classifier.fit(dswml.open_dataset(options.store))
        classifier.model_.save(options.model, overwrite=True)
        print(classifier.status_, classifier.objective_, classifier.relative_gap_)
