"""Compile the native codec with the sanitizers of the compiler, and run all operations.

    python -m tests.native_sanitizers

The exit status is that of the first run that found something.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from pallas_kernels._native import build

SANITIZERS = ("address,undefined", "thread")
_FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-pthread")


def main() -> int:
    for names in SANITIZERS:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "driver")
            build.compile_with_rows(
                program,
                Path(__file__).with_name("driver.cc"),
                ("-I", str(build.SOURCES)),
                (),
                flags=(*_FLAGS, f"-fsanitize={names}"),
            )
            status = subprocess.run([program], check=False).returncode
        print(f"-fsanitize={names}: {'clean' if status == 0 else f'exit status {status}'}")
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
