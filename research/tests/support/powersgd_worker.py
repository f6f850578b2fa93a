"""One of two processes that average gradients with the hook of PyTorch for PowerSGD."""

import pathlib

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

Gradients = dict[str, np.ndarray]


class Bucket:
    """What the hook reads of a bucket of DDP."""

    def __init__(self, matrices):
        self.flat = torch.cat([matrix.reshape(-1) for matrix in matrices])
        parts = self.flat.split([matrix.numel() for matrix in matrices])
        self.parts = [p.view(m.shape) for p, m in zip(parts, matrices, strict=True)]

    def buffer(self):
        return self.flat

    def gradients(self):
        return self.parts

    def index(self):
        return 0

    def is_last(self):
        return True


def averaged(process: int, folder: pathlib.Path, rank: int, gradients: Gradients):
    """Average matrices [steps, workers, rows, columns] by name: the means, and the last Q."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=process, world_size=2)
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, use_error_feedback=False
    )
    state.iter = state.start_powerSGD_iter  # without the exact steps before
    steps = len(next(iter(gradients.values())))
    results = {name: [] for name in gradients}
    for step in range(steps):
        matrices = [torch.tensor(gradients[name][step, process]) for name in gradients]
        bucket = Bucket(matrices)
        powerSGD_hook(state, bucket).wait()
        for name, part in zip(gradients, bucket.parts, strict=True):
            results[name].append(part.numpy().copy())
    dist.destroy_process_group()
    means = {name: np.stack(each) for name, each in results.items()}
    return means, state.q_memory_dict[0].numpy()
