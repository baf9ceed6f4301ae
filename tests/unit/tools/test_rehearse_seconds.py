"""Prices of a step that a rehearsal has written down."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from launcher.forecast.collectives import Group, collective_s
from launcher.forecast.efficiency import CONTENTION, FETCH_HOOK_OPERATORS, KERNEL_S
from launcher.forecast.machine import Machine
from launcher.forecast.trace.counting import work_of_call
from launcher.measure.hardware import gpu_named
from launcher.tools.rehearse.seconds import StepSeconds, operator_seconds, step_seconds
from launcher.tools.rehearse.timeline import ENTRY, Kind, Timeline, read_timeline
from launcher.tools.rehearse.topology import machine_of, read_topology
from launcher.tools.rehearse.verdict import lacking_format
from launcher.util.errors import UserError

H100 = Machine.of_gpu("H100")
ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, SEND = 0, 1, 2, 3, 6
COPY_TO_DEVICE, COPY_TO_HOST = 1, 2

Row = tuple[Kind, int, int, int, int]


def tensor(*shape: int, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def product(rows: int, **more: Any) -> dict[str, Any]:
    operands = [tensor(rows, 4096), tensor(4096, 4096)]
    return {"name": "aten::mm.default", "args": operands, "kwargs": {}, **more} | {
        "out": tensor(rows, 4096),
        "ranks": None,
    }


def timeline(folder: Path, rows: list[Row], *operators: dict[str, Any], **more: Any) -> Timeline:
    (folder / "t.entries").write_bytes(b"".join(ENTRY.pack(*row) for row in rows))
    content = {"operators": operators, "tf32": False, "tf32_convolutions": True, **more}
    (folder / "t.json").write_text(json.dumps(content))
    found = read_timeline(folder / "t")
    assert found is not None
    return found


def launched(operator: int, *, stream: int = 0, kernels: int = 1) -> list[Row]:
    kernel = (Kind.KERNEL, operator, stream, 0, 0)
    return [(Kind.OPERATOR, operator, stream, 0, 0), *kernels * [kernel]]


def seconds(folder: Path, rows: list[Row], *operators: dict[str, Any]) -> StepSeconds:
    return step_seconds(timeline(folder, rows, *operators), H100)


def test_kernels_follow_one_another_on_a_stream(tmp_path: Path) -> None:
    one = timeline(tmp_path, launched(1), product(8192))
    each = sum(operator_seconds(one.operators[0], H100).values())
    assert each == pytest.approx(2 * 8192 * 4096**2 / H100.matmul_flops_per_s["bf16"], rel=0.3)
    found = seconds(tmp_path, 3 * launched(1), product(8192))
    # The host is far ahead: the next step's first kernel waits for this one's last.
    assert found.total_s == pytest.approx(3 * (each + KERNEL_S))
    assert found.products_s == pytest.approx(3 * each)
    assert found.host_s == pytest.approx(3 * H100.operator_s)


def test_an_operator_of_two_kernels_has_the_same_work(tmp_path: Path) -> None:
    one = seconds(tmp_path, launched(1), product(8192))
    two = seconds(tmp_path, launched(1, kernels=2), product(8192))
    assert two.total_s - one.total_s == pytest.approx(KERNEL_S)


def test_a_step_of_small_kernels_takes_what_the_host_takes(tmp_path: Path) -> None:
    norm = {"name": "aten::relu.default", "args": [tensor(8)], "kwargs": {}, "out": tensor(8)}
    found = seconds(tmp_path, 100 * launched(1), norm)
    assert found.moved_s + found.starts_s < found.host_s
    assert found.total_s == pytest.approx(found.host_s, rel=0.01)


def test_a_hook_takes_what_it_takes_whatever_it_dispatches(tmp_path: Path) -> None:
    inside: list[Row] = 50 * [(Kind.OPERATOR, 1, 0, 1, 0)]
    found = seconds(tmp_path, [(Kind.HOOK, 0, 0, 1, 0), *inside], product(1))
    assert found.host_s == pytest.approx(FETCH_HOOK_OPERATORS * H100.operator_s)


def test_streams_run_side_by_side_until_one_waits_for_the_other(tmp_path: Path) -> None:
    rows = [*launched(1), (Kind.COLLECTIVE, 0, 7, 2**26, ALL_REDUCE << 32 | 8)]
    message_s = collective_s(H100, Group(size=8, per_node=8), "all_reduce", 2**26)
    end: Row = (Kind.SYNCHRONIZE, 0, 0, 0, 1)
    beside = seconds(tmp_path, [*rows, end], product(8192))
    compute_s = beside.products_s + beside.starts_s
    hidden_s = min(message_s, compute_s)
    assert beside.messages_s == pytest.approx(message_s)
    assert beside.total_s == pytest.approx(
        max(message_s, compute_s) + CONTENTION * hidden_s, rel=0.02
    )
    ordered = [
        *launched(1),
        (Kind.RECORD_EVENT, 0, 0, 5, 0),
        (Kind.WAIT_EVENT, 0, 7, 5, 0),
        rows[-1],
        (Kind.RECORD_EVENT, 0, 7, 6, 0),
        (Kind.WAIT_EVENT, 0, 0, 6, 0),
    ]
    waited = seconds(tmp_path, ordered, product(8192))
    assert waited.total_s == pytest.approx(message_s + compute_s, rel=0.01)
    assert waited.hidden_s == pytest.approx(0.0, abs=1e-9)


def test_the_host_waits_where_the_program_did(tmp_path: Path) -> None:
    wait: Row = (Kind.SYNCHRONIZE, 0, 0, 0, 0)
    dispatched = 1000 * [(Kind.OPERATOR, 2, 0, 0, 0)]
    ahead = seconds(tmp_path, [*launched(1), *dispatched], product(16384), product(1))
    waits = seconds(tmp_path, [*launched(1), wait, *dispatched], product(16384), product(1))
    assert waits.total_s == pytest.approx(
        ahead.products_s + ahead.starts_s + ahead.host_s, rel=0.01
    )
    assert ahead.total_s == pytest.approx(ahead.host_s, rel=0.01)


@pytest.mark.parametrize("direction", [COPY_TO_DEVICE, COPY_TO_HOST])
def test_transfers_take_the_link_to_the_host(direction: int, tmp_path: Path) -> None:
    found = seconds(tmp_path, [(Kind.COPY, 0, 0, 2**30, direction)])
    assert H100.host_to_device_bytes_per_s is not None
    assert found.transfers_s == pytest.approx(2**30 / H100.host_to_device_bytes_per_s, rel=0.01)


def test_ranks_of_two_nodes_meet_over_the_network(tmp_path: Path) -> None:
    """Ranks 0 and 8 are on two nodes of 8, ranks 0 and 1 on one."""
    message: Row = (Kind.COLLECTIVE, 1, 7, 2**28, ALL_GATHER << 32 | 2)
    times = []
    for ranks in ((0, 1), (0, 8)):
        operator = product(1) | {"name": "c10d::_allgather_base_.default", "ranks": list(ranks)}
        times.append(seconds(tmp_path, [message], operator).messages_s)
    sent = 2**28  # this rank's part
    assert H100.collectives is not None
    assert times[0] == pytest.approx(sent / H100.collectives["all_gather"].bytes_per_s, rel=0.02)
    assert times[1] == pytest.approx(sent / H100.network_bytes_per_s, rel=0.02)


def test_what_is_sent_and_received_goes_at_the_same_time(tmp_path: Path) -> None:
    sends: Row = (Kind.COLLECTIVE, 0, 7, 2**28, SEND << 32 | 2)
    receives: Row = (Kind.COLLECTIVE, 0, 7, 2**28, SEND + 1 << 32 | 2)
    one = seconds(tmp_path, [sends]).messages_s
    assert one > 0
    assert seconds(tmp_path, [sends, receives]).messages_s == one


def test_an_operator_that_torch_does_not_know_moves_its_bytes(tmp_path: Path) -> None:
    described = {"name": "theirs::norm.default", "args": [tensor(2**20)], "out": tensor(2**20)}
    (operator,) = timeline(tmp_path, [], described | {"kwargs": {}, "ranks": None}).operators
    assert operator.work.elementwise_bytes == 2 * 2 * 2**20


def test_kernels_in_triton_that_multiply_are_told(tmp_path: Path) -> None:
    described = {"name": "compiled", "bytes": [100, 200], "multiplies": True}
    found = timeline(tmp_path, 3 * launched(1), described)
    assert found.uncounted_products == 3
    assert found.operators[0].work.fused_bytes == 300


def test_a_gpu_lacks_the_format_of_a_product_and_of_nothing_else(tmp_path: Path) -> None:
    narrow, scale = tensor(16, 4096, dtype="float8_e4m3fn"), tensor(1, dtype="float32")
    scaled = {
        "name": "aten::_scaled_mm.default",
        "args": [narrow, tensor(4096, 4096, dtype="float8_e4m3fn"), scale, scale],
        "kwargs": {},
        "out": tensor(16, 4096),
        "ranks": None,
    }
    relu = {"name": "aten::relu.default", "args": [tensor(8)], "kwargs": {}, "out": tensor(8)}
    t4, a100, l4 = map(gpu_named, ("T4", "A100-40GB", "L4"))
    assert timeline(tmp_path, [], relu | {"ranks": None}).formats == set()
    bf16 = timeline(tmp_path, [], product(16)).formats
    assert [lacking_format(gpu, bf16) for gpu in (t4, a100, l4)] == ["bf16", None, None]
    both = timeline(tmp_path, [], product(16), scaled).formats
    assert [lacking_format(gpu, both) for gpu in (t4, a100, l4)] == ["fp8", "fp8", None]


@pytest.mark.parametrize(
    ("name", "moved_bytes"),
    [("all_gather_into_tensor", 0), ("wait_tensor", 0), ("all_to_all_single", 2 * 4 * 8 * 8)],
)
def test_collectives_of_a_compilers_graph_are_priced_as_messages(
    name: str, moved_bytes: int, tmp_path: Path
) -> None:
    """And one that no plan has ends nothing: it moves its bytes."""
    x = tensor(8, 8, dtype="float32")
    described = {"name": f"_c10d_functional::{name}.default", "args": [x], "kwargs": {}, "out": x}
    work = timeline(tmp_path, launched(1), described).operators[0].work
    assert work.elementwise_bytes + work.copied_bytes == moved_bytes


def test_products_in_fp32_are_at_the_rate_that_the_program_asked_for(tmp_path: Path) -> None:
    operands = [tensor(8192, 4096, dtype="float32"), tensor(4096, 4096, dtype="float32")]
    described = product(8192) | {"args": operands, "out": tensor(8192, 4096, dtype="float32")}
    slow, fast = (
        timeline(tmp_path, launched(1), described, tf32=tf32).operators[0] for tf32 in (False, True)
    )
    assert (slow.type_, fast.type_) == ("fp32", "tf32")
    assert operator_seconds(slow, H100)["products"] > 5 * operator_seconds(fast, H100)["products"]


@pytest.mark.parametrize("damage", ["missing", "cut", "json"])
def test_an_incomplete_timeline_is_none(damage: str, tmp_path: Path) -> None:
    timeline(tmp_path, launched(1), product(1))
    if damage == "missing":
        (tmp_path / "t.entries").unlink()
    elif damage == "cut":
        (tmp_path / "t.entries").write_bytes((tmp_path / "t.entries").read_bytes()[:-1])
    else:
        (tmp_path / "t.json").write_text('{"operators": [')
    assert read_timeline(tmp_path / "t") is None


def test_a_topology_replaces_what_a_data_sheet_says(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("gpus_per_node: 4\nnetwork_gbytes_per_s: 12.5\nnetwork_latency_us: 30\n")
    machine = machine_of("H100", 8, read_topology(path))
    assert machine.ranks_per_node == 4
    assert machine.network_bytes_per_s == 12.5e9
    assert machine.network_hop_s == pytest.approx(30e-6)
    assert machine.collectives == machine_of("H100", 8, {}).collectives


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus: 4", "'gpus' is unknown: it may say gpus_per_node, "),
        ("gpus_per_node: 0", "gpus_per_node is 0, but must be a number above 0"),
        ("gpus_per_node: 1.5", "gpus_per_node is 1.5, but must be whole"),
        ("network_gbytes_per_s: .nan", "is nan, but must be a number above 0"),
        ("link_gbytes_per_s: fast", "is 'fast', but must be a number above 0"),
        ("- 8", "write lines of name: number"),
    ],
)
def test_a_wrong_topology_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--topology .*" + said.replace("(", r"\(")):
        read_topology(path)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_is_as_many_products_as_torch_counts(groups: int, transposed: bool) -> None:
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer = kind(8, 16, 3, stride=2, padding=1, groups=groups, device="meta")
    inputs = torch.empty(2, 8, 14, 14, device="meta", requires_grad=True)

    def call() -> None:
        layer(inputs).sum().backward()

    with FlopCounterMode(display=False) as counter:
        call()
    # torch counts groups that are not there in its forward; one group is without doubt.
    if groups == 1:
        assert work_of_call(call).matmul_flops == counter.get_total_flops()
    else:
        alone = kind(8, 16, 3, stride=2, padding=1, device="meta")
        whole = work_of_call(lambda: alone(inputs).sum().backward()).matmul_flops
        assert work_of_call(call).matmul_flops == whole / groups


def test_an_update_of_many_tensors_reads_and_writes_what_it_changes() -> None:
    tensors = [torch.zeros(1000) for _ in range(3)]
    work = work_of_call(lambda: torch._foreach_mul_(tensors, 2.0))
    assert work.copied_bytes == 2 * 3 * 4000


@pytest.mark.parametrize("kind", [REDUCE, BROADCAST])
def test_one_way_is_half_of_an_all_reduce(kind: int, tmp_path: Path) -> None:
    way, both = (
        seconds(tmp_path, [(Kind.COLLECTIVE, 0, 0, 2**30, one << 32 | 8)]).messages_s
        for one in (kind, ALL_REDUCE)
    )
    assert way == pytest.approx(both / 2)
