"""One of two processes that average gradients with PyTorch's PowerSGD hook.

python powersgd_worker.py PORT PROCESS FOLDER RANK: reads FOLDER/gradients.npz, matrices
[steps, workers, rows, columns] by name, and writes the means and the last Q.
"""

import pathlib
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook


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


def main(port: str, process: int, folder: pathlib.Path, rank: int) -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=process, world_size=2)
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, use_error_feedback=False
    )
    state.iter = state.start_powerSGD_iter  # without the exact steps before
    gradients = np.load(folder / "gradients.npz")
    steps = len(gradients[gradients.files[0]])
    results = {name: [] for name in gradients.files}
    for step in range(steps):
        matrices = [torch.tensor(gradients[name][step, process]) for name in gradients.files]
        bucket = Bucket(matrices)
        powerSGD_hook(state, bucket).wait()
        for name, part in zip(gradients.files, bucket.parts, strict=True):
            results[name].append(part.numpy().copy())
    np.savez(folder / f"means{process}.npz", **{n: np.stack(each) for n, each in results.items()})
    np.save(folder / f"q{process}.npy", state.q_memory_dict[0].numpy())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4]))
