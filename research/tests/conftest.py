"""Files of this folder that hold no tests."""

collect_ignore = ["support/powersgd_worker.py"]  # needs torch
