"""`dynamiq-jax advise`: it says no where compression does not pay, and yes where it does."""

import dataclasses
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynamiq_jax as dq
from dynamiq_jax._commands.advise import Advise
from dynamiq_jax._console.errors import CommandError
from dynamiq_jax._prediction.advice import advice, predictions, topologies_in_order
from dynamiq_jax._prediction.device_speeds import CODEC_SPEEDS, SUM_SPEEDS

SLOW = Advise(link="1gbit", size="100M", workers=8, step_time=1.0)


def call_of(option) -> dict:
    """The arguments that the advice writes."""
    return eval(f"dict({option.call})")


def answer(**changes) -> tuple[str, list]:
    question = dataclasses.replace(SLOW, **changes).question()
    options = predictions(question)
    return advice(question, options), options


@pytest.mark.parametrize(("gradient", "bits"), [("f32", 32), ("bf16", 16)])
def test_a_sum_sends_its_size_almost_twice(gradient, bits):
    """Each worker sends all chunks but one in the reduction, and again in the gather."""
    plain, *_ = answer(gradient=gradient)[1]
    assert plain.bits == bits
    assert plain.sent == pytest.approx(2 * 7 / 8 * 100e6 * bits / 8, rel=1e-6)


def test_slow_links_are_worth_it():
    text, options = answer()
    plain, *compressed = options
    assert "Compress" in text
    assert 'method="dynamiq:5:ring".' in text
    # 16 bits against 5, and next to nothing for the codec of a GPU.
    best = min(option.all_reduce.total for option in compressed if option.bits == 5)
    assert plain.all_reduce.total / best == pytest.approx(16 / 5, rel=0.05)
    assert plain.step == pytest.approx(1.0 + plain.all_reduce.total)


def test_transfers_hide_under_a_step_and_the_codec_does_not():
    _, (_, *compressed) = answer(overlap=1.0, step_time=100.0)
    for option in compressed:
        assert option.all_reduce.codec > 0
        assert option.step == pytest.approx(100 + option.all_reduce.codec, rel=1e-12)


@pytest.mark.parametrize(
    ("device", "gbit", "tokens"),
    # For two slices, half of peak x 0.4 / bytes a second.
    [("tpu_v5e", 25, 12_608), ("tpu_v5p", 50, 14_688), ("tpu_v6e", 100, 14_688)],
)
def test_slices_of_tpus_have_the_share_of_a_chip_and_a_batch_that_hides_it(device, gbit, tokens):
    asked = Advise(device=device, size="256M", workers=2, step_time=0.1)
    text, options = answer(**dataclasses.asdict(asked))
    assert asked.question().network.gbit_per_s == gbit
    assert "Compress[/bold]: " in text
    assert f"from about {tokens:,} tokens" in text
    plain, *compressed = options
    assert all(option.all_reduce.total < plain.all_reduce.total for option in compressed)
    # Eight slices send 7/4 times as much.
    eight = {"device": device, "link": None}
    assert f"about {1.75 * tokens:,.0f} tokens" in answer(**eight)[0]
    assert f"about {3.5 * tokens:,.0f} tokens" in answer(**eight, gradient="f32")[0]
    assert "Do not compress" in answer(**eight, overlap=1.0, step_time=3.0)[0]
    assert "tokens" not in answer()[0]


@pytest.mark.parametrize(("link", "gbit"), (("pcie4", 80), ("pcie5", 224)))
def test_hosts_with_pcie_have_a_link_of_reports_and_a_slower_codec(link, gbit):
    _, inside = answer(link=link, size="1G")
    _, between = answer(link=f"{gbit}gbit", size="1G")
    for a, b in zip(inside, between, strict=True):
        assert a.all_reduce.wire == b.all_reduce.wire
    # Seconds of 1 G coordinates are nanoseconds of one.
    slower = inside[1].all_reduce.codec - between[1].all_reduce.codec
    assert slower == pytest.approx((8 - 1) * CODEC_SPEEDS["gpu"].ns_per_coordinate)
    _, given_ns = answer(link=link, size="1G", codec_ns=CODEC_SPEEDS["gpu"].ns_per_coordinate)
    assert given_ns == between


def test_links_of_reports_are_not_measured(capsys):
    Advise(link="pcie4").run()
    assert "Not measured" in " ".join(capsys.readouterr().out.split())


def test_few_bits_are_the_choice_of_the_user():
    assert "dynamiq:4:" not in answer()[0]
    assert "dynamiq:4:" in answer(bits=(4.0,))[0]
    assert "--bits is empty" in answer(bits=())[0]


def test_a_crowded_network_prefers_neighbours_and_odd_sizes_have_no_butterfly():
    assert ':ring"' in answer(oversubscription=4.0)[0]
    assert ':ring"' in answer()[0]  # as fast as the others, and the default
    far = answer(latency_us=20_000.0, workers=6)[0]
    assert ':all_to_all"' in far and "all-to-all traffic at full speed" in far
    assert not any("butterfly" in option.name for option in answer(workers=6)[1])


@settings(deadline=None)
@given(
    workers=st.sampled_from((2, 3, 4, 6, 8, 64, 1024)),
    link=st.sampled_from(("100mbit", "10gbit", "3200gbit")),
    latency_us=st.floats(0, 1e5),
    oversubscription=st.floats(1, 8),
)
def test_the_advised_topology_is_the_fastest_or_the_default(
    workers, link, latency_us, oversubscription
):
    """Whether to compress or not: a step is at most 2% longer than with another topology."""
    network = {"latency_us": latency_us, "oversubscription": oversubscription}
    text, options = answer(workers=workers, link=link, **network)
    times = {option.topology: option.step for option in options[1:] if option.bits == 5}
    supported = {"ring", "all_to_all"} | ({"butterfly"} if workers not in (3, 6) else set())
    assert times.keys() == supported
    line = topologies_in_order(options)
    (advised,) = re.findall(r"^Topology for 5 bits: (\w+)\. ", line)
    assert times[advised] < 1.02 * min(times.values())
    assert advised == "ring" or times["ring"] >= 1.02 * min(times.values())
    assert set(re.findall(r"(\w+) [\d.]+ \w+[,.]", line.split(": ")[2])) == supported
    assert "[bold]Compress" not in text or f':{advised}"' in text


@settings(deadline=None)
@given(
    hosts=st.sampled_from((2, 3, 4, 16, 64)),
    devices_per_host=st.sampled_from((2, 3, 8)),
    link=st.sampled_from(("1gbit", "100gbit", "3200gbit")),
    latency_us=st.floats(0, 1e5),
    device=st.sampled_from(("gpu", "cpu", "tpu_v5e")),
)
def test_between_hosts_of_many_devices_the_advice_is_to_sum_inside_of_them_first(
    hosts, devices_per_host, link, latency_us, device
):
    """A flat axis sends more from each host, straight messages most, and is never the advice."""
    text, (plain, *compressed) = answer(
        workers=hosts * devices_per_host,
        devices_per_host=devices_per_host,
        link=link,
        latency_us=latency_us,
        device=device,
        bits=(5.0,),
    )
    five = {option.name.removeprefix("5 bits, "): option for option in compressed}
    sent = {name: option.sent_by_host for name, option in five.items()}
    assert sent["ring"] == sent["all_to_all"] < sent["flat ring"] < sent["flat all_to_all"]
    # A host of d devices with n others scatters d n / (d + n - 1) times what it does on a ring.
    others = (hosts - 1) * devices_per_host
    times = devices_per_host * others / (others + devices_per_host - 1)
    of_ring = (sent["flat all_to_all"] / sent["flat ring"]) / ((1 + times) / 2)
    assert 0.9 < of_ring < 1  # statistics are the same in both
    for option in compressed:
        call = call_of(option)
        assert option.is_flat == ("flat" in option.name) == ("axis_name" not in call)
        choice = dq.Compression(call["method"].rpartition(":")[0], option.topology)
        assert dq.Compression(call["method"]) == choice and choice.method.bits == option.bits
    assert "flat" not in text and "flat" not in topologies_in_order([plain, *compressed])
    assert ("[bold]Compress" in text) == ('axis_name=("hosts", "local"), method=' in text)


def test_each_device_of_a_host_has_a_part_of_its_gradient_and_link():
    """The time of the wire is that of one device with both, and psum is summed alike."""
    _, whole = answer(workers=32, devices_per_host=8, link="80gbit", size="8G")
    _, part = answer(workers=4, link="10gbit", size="1G")
    inside = [option for option in whole if not option.is_flat]
    assert [option.name for option in inside] == [option.name for option in part]
    for of_host, of_device in zip(inside, part, strict=True):
        assert of_host.all_reduce.wire == of_device.all_reduce.wire
        assert of_host.sent == of_device.sent == of_host.sent_by_host / 8
        # Eight billion coordinates are summed inside, in as many nanoseconds as one takes seconds.
        more = of_host.all_reduce.codec - of_device.all_reduce.codec
        assert more == pytest.approx(8 * SUM_SPEEDS["gpu"].ns_per_coordinate)
    slices = answer(device="tpu_v5e", workers=16, devices_per_host=8, link=None, size="8G")
    chips = answer(device="tpu_v5e", workers=2, link=None, size="1G")
    assert slices[1][0].all_reduce.wire == chips[1][0].all_reduce.wire
    for text, _ in (slices, chips):
        assert "Between 2 slices" in text and "from about 12,608 tokens a slice" in text


def test_the_table_says_that_bytes_are_of_a_host(capsys):
    dataclasses.replace(SLOW, workers=16, devices_per_host=8).run()
    shown = " ".join(capsys.readouterr().out.split())
    assert "16 workers, 8 on each host" in shown and "sent by a host" in shown
    assert "5 bits, flat all_to_all" in shown and "Links inside of a host count as free" in shown
    SLOW.run()
    shown = capsys.readouterr().out
    assert "sent by each" in shown and "host" not in shown and "flat" not in shown


def test_the_line_of_topologies_has_the_fastest_first_and_is_empty_without_bits():
    line = topologies_in_order(answer(latency_us=100_000.0)[1])
    assert line.startswith("Topology for 5 bits: all_to_all. Predicted all-reduce: all_to_all ")
    assert line.index("butterfly") < line.index("ring")
    assert topologies_in_order(answer(bits=())[1]) == ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"link": "3200gbit"}, "adds at most 5% to a step"),
        ({"step_time": 1000.0}, "adds at most 5% to a step"),
        ({"overlap": 1.0, "step_time": 10.0}, "adds at most 5% to a step"),
        ({"link": "400gbit", "overlap": 0.5}, "the all-reduce adds at most 5% to a step"),
        ({"size": "1000"}, "adds at most 5% to a step"),
        ({"codec_ns": 50.0}, "the codec takes longer than the shorter transfer saves"),
        (
            {"device": "cpu", "link": "40gbit", "step_time": 0.01},
            "the codec takes longer than the shorter transfer saves",
        ),
        ({"link": "3600gbit", "size": "7G"}, "the gain is below 5%"),
    ],
)
def test_the_reason_not_to_compress_is_that_of_the_case(changes, why):
    text = answer(**changes)[0]
    assert "Do not compress" in text and why in text


@pytest.mark.parametrize(
    ("changes", "says"),
    (
        ({"workers": 1}, "--workers is 1"),
        ({"workers": 10**400}, r"--workers is 10*: give 2 to 1048576"),
        ({"step_time": 0.0}, "--step-time is 0.0"),
        ({"step_time": float("nan")}, r"--step-time is nan: give 1e-09 to 1000000000"),
        ({"step_time": float("inf")}, "--step-time is inf: give 1e-09 to"),
        ({"overlap": float("nan")}, "--overlap is nan: give 0 to 1"),
        ({"size": "9" * 400}, r"--size: '9{79} is above 10\*\*18\. Give one such as 8Mi"),
        ({"link": "9" * 400 + "gbit"}, r"--link: .* is above 10\*\*18"),
        ({"overlap": 1.5}, "--overlap is 1.5"),
        ({"link": "fast"}, "--link: 'fast'"),
        ({"size": "many"}, "--size: 'many'"),
        ({"bits": (1.0,)}, "--bits: bits=1.0"),
        ({"bits": (), "every": 3}, "--every is for compressed rounds, but --bits is empty"),
        ({"every": 0}, "--every is 0: give at least 1"),
        ({"latency_us": -1.0}, "--latency-us is -1.0: give 0 to"),
        ({"latency_us": float("inf")}, "--latency-us is inf: give 0 to"),
        ({"oversubscription": float("inf")}, "--oversubscription is inf"),
        ({"oversubscription": 0.5}, "--oversubscription is 0.5: give 1 to"),
        ({"codec_ns": -1.0}, "--codec-ns is -1.0: give 0 to"),
        ({"devices_per_host": 0}, "--devices-per-host is 0: give at least 1"),
        ({"devices_per_host": 3}, "--devices-per-host is 3, but --workers is 8. Give the devices"),
        ({"devices_per_host": 8}, "--devices-per-host is 8, but --workers is 8. Give the devices"),
        ({"devices_per_host": 4, "link": "pcie4"}, "--link is pcie4, which is inside of a host"),
        ({"link": "pcie4", "device": "cpu"}, "--link is pcie4, .*--device is cpu"),
    ),
)
def test_questions_that_make_no_sense(changes, says):
    with pytest.raises(CommandError, match=says):
        answer(**changes)


@settings(deadline=None)
@given(
    digits=st.integers(1, 600).flatmap(lambda n: st.text("0123456789", min_size=n, max_size=n)),
    unit=st.sampled_from(("", "K", "Gi")),
    step_time=st.floats(),
    overlap=st.floats(),
    codec_ns=st.none() | st.floats(),
)
def test_every_answer_is_a_number(digits, unit, step_time, overlap, codec_ns):
    """Or one error that names the option."""
    changes = {"size": digits + unit, "step_time": step_time, "overlap": overlap}
    try:
        text, options = answer(**changes, codec_ns=codec_ns, bits=(5.0,))
    except CommandError as error:
        assert str(error).startswith("--")
    else:
        assert "nan" not in text
        assert all(option.step > 0 and option.sent >= 0 for option in options)


def test_the_command_prints_a_table_and_keeps_it(tmp_path, capsys):
    path = tmp_path / "advice.json"
    assert dataclasses.replace(SLOW, json=path).run() == 0
    shown = capsys.readouterr().out
    assert "psum, bf16" in shown
    assert "5 bits, ring" in shown
    assert "Topology for 5 bits: ring." in shown
    assert "measured on one H200" in " ".join(shown.split())
    kept = json.loads(path.read_text())
    assert len(kept["results"]) == 1 + 3 * 3
    assert kept["config"]["link"] == "1gbit"


def test_it_names_the_link_that_islands_need():
    asked = dataclasses.replace(SLOW, workers=4, size="1G", step_time=5.0, bits=(4.0, 5.0))
    assert asked.island_links() == []
    sparse, four, five, fastest, memory = dataclasses.replace(asked, every=100).island_links()
    # Three messages of 4 G bits in 50 of 500 seconds.
    assert "4 islands with a round every 100 steps need 240 Mbit/s" in four
    assert "need 15 Mbit/s each to exchange 0.25 bits" in sparse
    # Over 1 Gbit/s, an exchange takes 12 s by the formula, and 1.25 to 1.66 times that.
    assert "96% to 97% of the time computes" in four
    assert "a message has 500 MB" in four and "take 16 GB on the host" in memory
    assert "300 Mbit/s each to exchange 5 bits in 10% of the time" in five
    # The devices of a host are one island.
    hosts = dataclasses.replace(asked, workers=16, devices_per_host=4, every=100).island_links()
    assert "4 islands with a round every 100 steps need 240 Mbit/s" in hosts[1]
    # Of so few bits in dense messages, nobody has measured the rounds.
    assert (
        "2.375" not in dataclasses.replace(asked, bits=(2.375,), every=100).island_links()[-2][:60]
    )
    # An exchange of 4 bits takes 17 s, less than a fifth of the steps: more rounds would cost more.
    assert "4 bits are the fastest on this link, 1.01 times as fast as those of 5 bits" in fastest


def test_sparse_messages_are_the_fastest_where_a_round_is_mostly_wire():
    asked = dataclasses.replace(SLOW, workers=4, size="1G", step_time=5.0, bits=(4.0,), every=30)

    def fastest(**changes):
        return dataclasses.replace(asked, **changes).island_links()[-2]

    # 1.23 * (150 + 1.455 * 7.5) seconds, over 1.07 * (150 + 1.455 * 13.8).
    words = "0.46 bits, islands.Sparse(keep=272), are the fastest on this link, 1.09 times as fast"
    assert words in fastest(link="100mbit")
    assert "as those of 0.25 bits. They take 1.07 times the rounds" in fastest(link="100mbit")
    assert "0.11 bits, islands.Sparse(keep=46), are" in fastest(link="3mbit")
    assert "messages of 4 bits are" in fastest(link="10gbit")
    # 0.62 * 30 * 1.455 * 6 G bits of all-reduces less 1.455 * 12 G bits, in 150 - 0.62 * 150 s.
    assert "From 2.54 Gbit/s on, an all-reduce of 4 bits in every step is" in fastest()
    # Two cores take seconds for messages.
    assert "1.09 times" not in fastest(link="100mbit", device="cpu", step_time=0.1)
