"""Files of this folder that hold no tests."""

import importlib.util

# Commands, two of which need cosmic-ray and torch.
collect_ignore = [
    "mutants.py",
    "soak",
    "native_faults",
    "support/powersgd_worker.py",
]
# Third-party trainers have environments of their own: see `make test-trainers`.
for trainer in ("tunix", "maxtext"):
    if importlib.util.find_spec(trainer) is None:
        collect_ignore.append(f"trainers/test_{trainer}.py")
