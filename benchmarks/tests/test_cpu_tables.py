"""The list of all measurements on CPUs: options that exist, files that pages read, resumption."""

import importlib
from pathlib import Path

import pytest
import tyro

from benchmarks import cpu_tables
from benchmarks.cpu_tables import STEPS, Config
from benchmarks.harness.files import path_of

names = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)


@names
@pytest.mark.parametrize("is_tiny", [False, True])
def test_commands_have_options_that_their_programs_take(step, is_tiny, tmp_path):
    _, flag, module, *options = step.command(tiny=tmp_path if is_tiny else None)
    assert flag == "-m"
    if step.name == "entropy_network":
        config = importlib.import_module(f"{module}.command").Emulation
    else:
        config = importlib.import_module(module).Config
    parsed = tyro.cli(config, args=options)
    writes = getattr(parsed, "save", True)
    to_file = getattr(parsed, "output", getattr(parsed, "json", path_of(step.name)))
    assert (Path(to_file).resolve() == path_of(step.name) and writes) != is_tiny


@names
def test_files_have_the_names_of_the_list(step):
    if not step.file_option:
        program = importlib.import_module(f"benchmarks.{step.module}")
        assert f'@benchmark("{step.name}")' in Path(program.__file__).read_text()


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the list with measurements that fail by name, and return those that were started."""

    def run(*failing, **options):
        started = []

        def measured(step, config):
            started.append(step.name)
            if step.name not in failing and not config.tiny:
                cpu_tables._marker(config, step).touch()
            return step.name not in failing

        monkeypatch.setattr(cpu_tables, "_measured", measured)
        monkeypatch.setattr(cpu_tables, "_wait_until_quiet", lambda most: None)
        monkeypatch.setattr(
            cpu_tables.subprocess, "run", lambda command, **_: started.append(command[-1])
        )
        status = cpu_tables.main(Config(folder=tmp_path, **options))
        return status, started

    return run


def test_a_run_goes_on_where_it_was(run):
    only, pages = ("native", "codec", "memory"), ["docs.scripts.tables", "docs.scripts.figures"]
    assert run("codec", only=only) == (1, ["native", "codec", "memory"])
    assert run(only=only) == (0, ["codec", *pages])
    assert run(only=only) == (0, pages)
    assert run(only=only, tiny=True) == (0, list(only))
    assert run(only=only, again=True) == (0, [*only, *pages])
