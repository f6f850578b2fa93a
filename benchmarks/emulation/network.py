"""Time, bytes and error of several settings between emulated hosts, measured in turns."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.emulation.hosts import Hosts, joined_hosts, link_patience
from dynamiq_jax._console.units import format_rate
from dynamiq_jax._measurement.settings import BF16_RING, PSUM, Setting, parse_setting

Row = dict[str, Any]  # of a table, and of the JSON file


class NetworkRun:
    """A measurement between a number of hosts, in one set of processes.

    Args:
      settings: what to measure.
      num_hosts: number of hosts.
      size: float32 coordinates of every host.
      repeats: timed calls of each setting at each rate.
      seed: chooses gradients and rounding.
      timeout: seconds without an answer, beyond what the link takes, after which all ends.

    Raises:
      CommandError: a setting is not possible for so many hosts.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        num_hosts: int,
        *,
        size: int,
        repeats: int,
        seed: int,
        timeout: float,
    ):
        self.num_hosts = num_hosts
        self._settings, self._size, self._repeats = settings, size, repeats
        self._seed, self._timeout = seed, timeout
        self._sent = {s.name: s.wire_report(size, num_hosts).bytes_per_worker for s in settings}

    def steps(self, num_rates: int) -> int:
        """Return the number of steps that `measure` reports."""
        return len(self._settings) * (1 + (1 + num_rates) * (1 + self._repeats))

    def measure(self, rates: Sequence[float], done: Callable[[str], None]) -> tuple[Row, list[Row]]:
        """Measure without a limit, then at every rate.

        Args:
          rates: of every link, bits a second.
          done: called with a text after every step.

        Returns:
          What a host told of its programs when it joined, and a row for every rate and setting.

        Raises:
          CommandError: a process ended, failed or did not answer in time.
        """
        module = "benchmarks.emulation.measuring_host"
        config = {"size": self._size, "seed": self._seed}
        with joined_hosts(self.num_hosts, module, config, timeout=self._timeout) as hosts:
            checks = {s.name: self._compile(hosts, s.name, done) for s in self._settings}
            local = self._timed(hosts, None, done)
            rows = [
                self._row(name, rate, timed[name], local[name]) | checks[name]
                for rate in rates
                for timed in [self._timed(hosts, rate, done)]
                for name in checks
            ]
        facts = hosts.joined[0]
        for row in rows:
            row |= {"speedup": _speedups(row, rows), "threads": facts["threads"]}
        return facts, rows

    def _compile(self, hosts: Hosts, setting: str, done: Callable[[str], None]) -> Row:
        answers = hosts.ask({"do": "compile", "setting": setting}, f"compiling {setting}")
        done(f"compiled {setting}")
        checksums = {number for answer in answers for number in answer["checksums"]}
        return {"vnmse": answers[0]["vnmse"], "replicas_equal": len(checksums) == 1}

    def _timed(
        self, hosts: Hosts, rate: float | None, done: Callable[[str], None]
    ) -> dict[str, dict[str, list[float]]]:
        """Time all settings at a rate, in turns. The first turn warms up and does not count.

        Returns:
          Setting to seconds, CPU seconds and interface bytes: a number for each repeat, the time
          of the slowest host and the means over hosts of the others.
        """
        hosts.network.set_rate(rate)
        at = "an unlimited link" if rate is None else format_rate(rate)
        patience = link_patience(max(self._sent.values()), rate)
        seconds: dict[str, dict[str, list[float]]] = {
            name: {"seconds": [], "cpu_seconds": [], "interface_bytes": []} for name in self._sent
        }
        for repeat in range(-1, self._repeats):
            for name, numbers in seconds.items():
                request = {"do": "run", "setting": name, "seed": repeat + 2}
                before = hosts.network.bytes_sent()
                answers = hosts.ask(request, f"measuring {name} at {at}", patience=patience)
                after = hosts.network.bytes_sent()
                done(f"{name} at {at}")
                if repeat >= 0:
                    sent = [b - a for a, b in zip(before, after, strict=True)]
                    numbers["seconds"].append(max(a["seconds"] for a in answers))
                    numbers["cpu_seconds"].append(
                        statistics.fmean(a["cpu_seconds"] for a in answers)
                    )
                    numbers["interface_bytes"].append(statistics.fmean(sent))
        return seconds

    def _row(self, setting: str, rate: float, timed: dict[str, Any], local: dict[str, Any]) -> Row:
        sent = self._sent[setting]
        seconds, ideal = statistics.median(timed["seconds"]), 8 * sent / rate
        on_interface = statistics.median(timed["interface_bytes"])
        return {
            "setting": setting,
            "hosts": self.num_hosts,
            "rate": rate,  # bits a second
            "size": self._size,
            "seconds": seconds,
            "repeats": timed["seconds"],
            "wire_seconds": ideal,  # the bytes of wire_report at the rate, nothing else
            "times_wire": seconds / ideal,
            "local_seconds": statistics.median(local["seconds"]),  # the same on unlimited links
            "cpu_seconds": statistics.median(timed["cpu_seconds"]),  # of each host
            "bytes_per_worker": sent,
            "interface_bytes": on_interface,
            "overhead": on_interface / sent,
        }


def _speedups(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """Return the speed-up of a row over each baseline that is in the run."""
    speedups = {}
    for name in (PSUM, BF16_RING):
        baseline = parse_setting(name)
        for other in rows:
            same = (other["hosts"], other["rate"]) == (row["hosts"], row["rate"])
            is_baseline = same and parse_setting(other["setting"]) == baseline
            if is_baseline and other["setting"] != row["setting"]:
                speedups[name] = other["seconds"] / row["seconds"]
    return speedups
