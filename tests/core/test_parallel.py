"""Problems that GPUs share."""

import pytest

from leanbench.configs.lookup import choose
from leanbench.core.axes import AXES
from leanbench.core.errors import InvalidValue, Reason
from leanbench.core.parallel import GpuCounts, counts_of
from leanbench.core.problem import AttentionProblem
from leanbench.core.registry import kernel
from leanbench.gpu.catalogue import find


def problem(parallel: str, context: int | tuple[int, ...] = 8192) -> AttentionProblem:
    batch = 1 if isinstance(context, int) else len(context)
    return AttentionProblem(batch, 32, 8, context, 128, parallel=parallel)


def test_values_labels_and_json():
    axis = AXES["parallel"]
    assert axis.parse("none,TP:2,cp:2,tp:4xcp:2") == ("none", "tp:2", "cp:2", "cp:2xtp:4")
    assert axis.parse("tp:1,cp:1xtp:2") == ("none", "tp:2")
    assert counts_of("cp:2xtp:4") == GpuCounts(tensor=4, context=2)
    assert counts_of("none").gpus == 1
    assert problem("cp:2").label == "b1 h32/8 n8192 d128 fp16 HND cp:2"
    assert AttentionProblem.from_dict(problem("cp:2").to_dict()) == problem("cp:2")
    assert "parallel" not in problem("none").to_dict()


@pytest.mark.parametrize(
    ("text", "reason", "limit"),
    [
        ("cp", Reason.SYNTAX, None),
        ("cp:2xcp:2", Reason.SYNTAX, None),
        ("pp:2", Reason.SYNTAX, None),
        ("cp:0", Reason.BELOW_MINIMUM, 1),
        ("cp:4xtp:4", Reason.ABOVE_MAXIMUM, 8),
    ],
)
def test_invalid_values(text, reason, limit):
    with pytest.raises(InvalidValue) as caught:
        AXES["parallel"].parse(text)
    assert (caught.value.value, caught.value.reason, caught.value.limit) == (text, reason, limit)


def test_shards_are_the_problem_together():
    whole = problem("cp:3xtp:2", (1000, 7, 3))
    shards = [whole.shard(rank) for rank in range(6)]
    kinds = {(shard.q_heads, shard.kv_heads, shard.parallel) for shard in shards}
    assert kinds == {(16, 4, "none")}
    assert [shard.contexts for shard in shards[:3]] == [(334, 3, 1), (333, 2, 1), (333, 2, 1)]
    assert [shard.contexts for shard in shards[3:]] == [shard.contexts for shard in shards[:3]]
    assert whole.kv_bytes == shards[0].kv_bytes
    assert whole.kv_bytes == (334 + 3 + 1) * 4 * 128 * 2 * 2


def test_launch_settings_follow_from_what_one_gpu_has():
    assert problem("cp:2xtp:2").known_to_host == AttentionProblem(1, 16, 4, 4096, 128)
    ragged = problem("cp:2", (1000, 7))
    assert ragged.known_to_host.context == 500
    spec = find("h200")
    shared = choose(kernel("lean"), problem("cp:2"), spec).config
    assert shared == choose(kernel("lean"), problem("none", 4096), spec).config


def test_kernels_that_cannot_share_refuse():
    assert kernel("lean").unsupported_reason(problem("cp:2")) is None
    assert kernel("lean").unsupported_reason(problem("tp:2")) is None
    assert kernel("fa2").unsupported_reason(problem("cp:2")) == (
        "fa2 runs on one GPU, this problem has parallel cp:2: leave it out"
    )
    # Each GPU runs it on its own heads.
    assert kernel("fa2").unsupported_reason(problem("tp:2")) is None
    reason = kernel("nccl_all_gather").unsupported_reason(problem("tp:2"))
    assert reason == "nccl_all_gather merges what GPUs make of shards: give parallel cp:2"
    windows = AttentionProblem(1, 32, 8, 8192, 128, window_left=100, parallel="cp:2")
    assert kernel("lean_cuda").unsupported_reason(windows) == (
        "lean_cuda takes no windows where GPUs share sequences (cp:2): split heads, with tp"
    )
    ring = kernel("ring_attention").unsupported_reason(problem("cp:3"))
    assert ring is not None
    assert "8192 tokens do not divide by 3" in ring
