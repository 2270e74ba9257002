"""Spreads the workers of pytest-xdist over all GPUs, before any of them touches one. Imported for that."""

import os

import torch

worker, count = os.environ.get("PYTEST_XDIST_WORKER", ""), torch.cuda.device_count()
if worker and count > 1:
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    devices, first = given.split(","), int(worker.removeprefix("gw")) % count
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])
