"""Reserved bytes of a run, beyond what its own stream replays."""

from test_plan_predict import resolved_of

from launcher.forecast.allocator import replay
from launcher.forecast.fit import reserved
from launcher.forecast.predict import predict


def test_block_inputs_on_their_way_to_the_host_and_back_are_still_reserved() -> None:
    run = resolved_of(
        1,
        device_type="cuda",
        precision="bf16",
        activation_checkpointing="offload",
        layers=6,
        d_model=128,
        heads=2,
        micro_batch=512,
    )
    found = predict(run)
    replayed = replay(found.events, found.streams, expandable_segments=run.expandable_segments)
    input_bytes = 2 * 128 * 512 * run.seq_len
    expected = replayed.peak_reserved_bytes + 2 * 6 * input_bytes
    assert reserved(found, run, limit_bytes=None).peak_reserved_bytes == expected
    # With less memory torch waits for the copies.
    limited = reserved(found, run, limit_bytes=replayed.peak_reserved_bytes + input_bytes)
    assert limited.peak_reserved_bytes == replayed.peak_reserved_bytes + input_bytes
    assert not limited.out_of_memory
