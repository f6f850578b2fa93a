"""Files of this folder that hold no tests."""

import importlib.util

# Commands, one of which needs cosmic-ray.
collect_ignore = ["mutants.py", "soak", "native_faults"]
# Third-party trainers have environments of their own: see `make test-trainers`.
for trainer in ("tunix", "maxtext"):
    if importlib.util.find_spec(trainer) is None:
        collect_ignore.append(f"trainers/test_{trainer}.py")
