"""What the README shows runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_snippets_run_in_order():
    namespace: dict = {}
    for block in code_blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["loss"] > 0
    assert namespace["report"].bytes_per_worker > 0


def test_diff_names_a_public_function():
    import dynamiq_jax as dq

    (added,) = re.findall(r"^\+ grads = dq\.(\w+)", code_blocks("diff")[0], flags=re.MULTILINE)
    assert added in dq.__all__


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [
        target for block in code_blocks("sh") for target in re.findall(r"^make (\w+)", block, re.M)
    ]
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_linked_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.slow
def test_example_help_names_the_options_that_the_readme_and_docs_use():
    command = [sys.executable, str(ROOT / "examples" / "finetune_lm.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for option in ("--method", "--bits", "--topology", "--workers", "--steps", "--seed"):
        assert option in shown


@pytest.mark.slow
def test_example_runs_end_to_end_at_small_size(tmp_path):
    options = "--workers 2 --pretrain-steps 2 --steps 3 --width 64 --layers 1 --heads 2"
    options += " --context 32 --batch 1"
    command = [sys.executable, str(ROOT / "examples" / "finetune_lm.py"), *options.split()]
    finished = subprocess.run(
        [*command, "--output-dir", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "bits per coordinate" in finished.stdout
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".json"}
