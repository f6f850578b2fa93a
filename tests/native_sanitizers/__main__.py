"""Compile the native codec with the sanitizers of the compiler, and run all operations.

    python -m tests.native_sanitizers

Each run is repeated with every instruction set of this machine, and has to end with the digest that
is known. The exit status is that of the first run that found something.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pallas_kernels._native import build

SANITIZERS = ("address,undefined", "thread")
_FLAGS = ("-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-pthread")
# The same with AVX2, AVX-512 and NEON, and with -O0 to -O3 of GCC.
_DIGEST = "225f71c22409a539"


def main() -> int:
    for names in SANITIZERS:
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "driver")
            build.compile_with_rows(
                program,
                (Path(__file__).with_name("driver.cc"),),
                ("-I", str(build.SOURCES)),
                (),
                flags=(*_FLAGS, f"-fsanitize={names}"),
            )
            for limit in ("", "avx2"):
                status = _run(program, limit)
                print(f"-fsanitize={names}: {'clean' if status == 0 else f'exit status {status}'}")
                if status:
                    return status
    return 0


def _run(program: Path, limit: str) -> int:
    done = subprocess.run(
        [program],
        env={**os.environ, "DYNAMIQ_NATIVE_ISA": limit},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout.strip())
    if done.returncode == 0 and _DIGEST not in done.stdout:
        print(f"The digest is not {_DIGEST}, which it is with other compilers and machines.")
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
