"""Arguments of a launch of lean.cu, recorded by a fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from leanbench.kernels.lean import cuda, cuda_driver
from leanbench.kernels.lean.cuda import CudaLaunch, misalignment
from leanbench.kernels.lean.cuda_build import CudaBuild
from leanbench.kernels.lean.cuda_kernel import LeanCuda
from leanbench.kernels.lean.cuda_params import PARAMS_ALIGNMENT, Params
from leanbench.kernels.lean.workspace import Lent

from leanbench.core.extras import Extras
from leanbench.core.inputs import AttentionInputs, make_inputs
from leanbench.core.problem import AttentionProblem
from leanbench.gpu.catalogue import find

H200 = find("h200")
FUNCTION = 0x1234
#: One cluster of 8 for the output tile.
PROBLEM = AttentionProblem(1, 8, 1, (90,), 64, page_size=16)
BUILD = CudaBuild.of(PROBLEM, LeanCuda().any_length_config(PROBLEM, H200))


class Driver:
    """A driver that records launches, and edits tensor maps like the real one."""

    def __init__(self) -> None:
        #: Parameters, stream, (grid, block, shared bytes), cluster of each.
        self.launches: list[tuple[Params, int, tuple[int, ...], int]] = []
        self.moved: list[int] = []
        #: Words of tensor maps: address, dtype, rank, sizes, strides, box, modes.
        self.encoded: list[tuple[int, ...]] = []
        self.status = 0
        #: Result of each borrow, and whether the next launch may keep it.
        self.lent: list[Lent] = []
        self.stays = False

    def lend(self, device: torch.device, slots_bytes: int) -> Lent:
        assert (device, slots_bytes) == (torch.device("cuda", 0), 4096)
        slots = torch.empty(slots_bytes // 8, dtype=torch.int64)
        replays = torch.zeros(1, dtype=torch.int32)
        self.lent.append(Lent(slots, -len(self.lent) - 1, replays, self.stays))
        return self.lent[-1]

    def entry_point(self, name: str, arguments: int) -> Callable[..., int]:
        known = {
            "cuLaunchKernelEx": self.launch,
            "cuTensorMapReplaceAddress": self.move,
            "cuTensorMapEncodeTiled": self.encode,
        }
        return known[name]

    def launch(self, config: int, function: int, pointers: int, extra: None) -> int:
        assert function == FUNCTION
        address = ctypes.c_uint64.from_address(pointers).value
        assert address % PARAMS_ALIGNMENT == 0
        words = (ctypes.c_uint32 * 7).from_address(config)
        stream, attributes, count = (ctypes.c_uint64 * 3).from_address(config + 32)
        cluster = (ctypes.c_uint32 * 3).from_address(attributes)[2] if count & 0xFFFFFFFF else 1
        params = Params.from_buffer_copy(
            (ctypes.c_uint8 * ctypes.sizeof(Params)).from_address(address)
        )
        self.launches.append((params, stream, (words[0], words[3], words[6]), cluster))
        return self.status

    def move(self, place: int, address: int) -> int:
        assert place % PARAMS_ALIGNMENT == 0
        ctypes.c_uint64.from_address(place).value = address
        self.moved.append(address)
        return 0

    def encode(self, place, dtype, rank, address, sizes, strides, box, steps, *modes):
        assert place % PARAMS_ALIGNMENT == 0
        words = (
            *(address, dtype, rank),
            *(ctypes.c_uint64 * 4).from_address(sizes),
            *(ctypes.c_uint64 * 3).from_address(strides),
            *(ctypes.c_uint64 * 2).from_address(box),
            *modes,
        )
        (ctypes.c_uint64 * 16).from_address(place)[:] = words
        assert (ctypes.c_uint32 * 4).from_address(steps)[:] == [1] * 4
        self.encoded.append(words)
        return self.status


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "_entry_point", driver.entry_point)
    monkeypatch.setattr(cuda_driver, "_function", lambda build, device: FUNCTION)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    monkeypatch.setattr(cuda_driver.WORKSPACES, "lend", driver.lend)
    return driver


def launch_over(inputs: AttentionInputs) -> CudaLaunch:
    config = replace(LeanCuda().any_length_config(PROBLEM, H200), cluster_size=8)
    params = Params()
    params.k, params.v = inputs.k_cache.data_ptr(), inputs.v_cache.data_ptr()
    params.kv_heads, params.tile_shift = 1, 7
    build, device = CudaBuild.of(PROBLEM, config), torch.device("cuda", 0)
    return CudaLaunch(build, device, 64, params, 4096, inputs.k_cache.shape[1], ())


def test_a_relaunch_points_to_the_extras_of_each_call(driver):
    names = ("sinks", "alibi_slopes", "k_descale", "v_page_descale", "cu_seqlens_q")
    inputs = make_inputs(PROBLEM, "cpu")
    relaunch = cuda.CudaRelaunch(replace(launch_over(inputs), extras=names))
    given = [Extras()._replace(**{name: torch.zeros(4) for name in names}) for _ in range(2)]
    for extras in given:
        call(relaunch, inputs, 90, extras)
    for (params, *_), extras in zip(driver.launches, given, strict=True):
        scales = params.k_descale.at, params.v_page_descale.at
        pointers = (params.sinks, params.alibi_slopes, *scales, params.cu_seqlens_q)
        assert pointers == tuple(extras.tensors[name].data_ptr() for name in names)
    # A missing tensor is not replaced by a pointer of the previous call.
    with pytest.raises(AttributeError):
        call(relaunch, inputs, 90, given[0]._replace(k_descale=None))


def call(relaunch, inputs, context, extras=None):
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.cache_seqlens)
    relaunch(*tensors, context, inputs.block_table, inputs.out, inputs.lse, extras)


def test_a_relaunch_writes_pointers_and_the_length(driver):
    first, second = make_inputs(PROBLEM, "cpu"), make_inputs(PROBLEM, "cpu")
    mixed = replace(second, v_cache=first.v_cache)
    launch = launch_over(first)
    relaunch = cuda.CudaRelaunch(launch)
    assert relaunch.tile_tokens == 128
    calls = ((first, 90), (second, 65), (mixed, 66))
    for (inputs, context), number in zip(calls, range(1, 4), strict=True):
        call(relaunch, inputs, context)
        (params, stream, sizes, cluster), lent = driver.launches[-1], driver.lent[-1]
        # Tensor maps are moved to K and V once, and again for other addresses.
        k, v = inputs.k_cache.data_ptr(), inputs.v_cache.data_ptr()
        assert (len(driver.moved), driver.moved[-2:]) == (2 * number, [k, v])
        assert (stream, cluster) == (77, 8)
        assert sizes == (64, 32 * launch.build.warps, launch.build.shared_bytes)
        assert params.q == inputs.q.data_ptr()
        assert params.k == params.k_map.words[0] == k
        assert params.v == params.v_map.words[0] == v
        assert (params.out, params.lse) == (inputs.out.data_ptr(), inputs.lse.data_ptr())
        assert inputs.cache_seqlens is not None
        assert inputs.block_table is not None
        assert params.cache_seqlens == inputs.cache_seqlens.data_ptr()
        assert params.block_table == inputs.block_table.data_ptr()
        assert params.context == context
        # The borrowed slots, and the prepared parameters.
        assert (params.partials, params.epoch) == (lent.slots.data_ptr(), lent.epoch)
        assert params.replays == lent.replays.data_ptr()
        assert (params.kv_heads, params.tile_shift) == (1, 7)
    # The original launch is unchanged.
    assert launch.params.context == 0


def test_a_relaunch_keeps_the_workspace_of_its_stream(driver, monkeypatch):
    driver.stays = True
    epochs = iter([7, -8])
    monkeypatch.setattr(cuda_driver.WORKSPACES, "next_epoch", lambda: next(epochs))
    inputs = make_inputs(PROBLEM, "cpu")
    relaunch = cuda.CudaRelaunch(launch_over(inputs))
    for _ in range(3):
        call(relaunch, inputs, 90)
    (lent,) = driver.lent
    assert [params.epoch for params, *_ in driver.launches] == [lent.epoch, 7, -8]
    for params, stream, *_ in driver.launches:
        assert (params.partials, stream) == (lent.slots.data_ptr(), 77)
        assert params.replays == lent.replays.data_ptr()


def test_k_and_v_share_a_tensor_map_where_their_strides_agree(monkeypatch):
    encoded: list[tuple[int, ...]] = []

    def tensor_map(address: int, shape: object, strides: tuple[int, ...], *_: object) -> list[int]:
        encoded.append(strides)
        return [len(encoded)] * 16

    monkeypatch.setattr(cuda, "tensor_map", tensor_map)
    inputs = make_inputs(PROBLEM, "cpu")
    params = cuda._params(inputs, BUILD, {})
    assert (params.k_map.words[:], params.v_map.words[:]) == ([1] * 16, [1] * 16)
    wider = torch.cat([inputs.v_cache, inputs.v_cache], dim=3)[..., : PROBLEM.head_dim]
    params = cuda._params(replace(inputs, v_cache=wider), BUILD, {})
    assert (params.k_map.words[:], params.v_map.words[:]) == ([2] * 16, [3] * 16)
    assert encoded == [inputs.k_cache.stride(), inputs.k_cache.stride(), wider.stride()]


def test_what_the_driver_refuses_is_an_error(driver, monkeypatch):
    driver.status = 1
    monkeypatch.setattr(
        cuda_driver._driver(), "cuGetErrorString", lambda status: (0, b"invalid argument")
    )
    launch = launch_over(make_inputs(PROBLEM, "cpu")).run()
    with pytest.raises(RuntimeError, match=r"^CUDA driver: invalid argument$"):
        launch()
    with pytest.raises(RuntimeError, match=r"^CUDA driver: invalid argument$"):
        cuda_driver.tensor_map(4096, (1, 1, 1, 64), (64, 64, 64, 1), BUILD)


@pytest.mark.parametrize(
    ("field", "bytes_past", "words"),
    [
        ("k_cache", 8, "k_cache starts at or steps by no multiple of 16 bytes"),
        ("v_cache", 2, "v_cache starts at or steps by no multiple of 16 bytes"),
        ("q", 2, "q starts at or steps by no multiple of 4 bytes"),
        ("out", 4, "out starts at or steps by no multiple of 8 bytes"),
        ("q", 4, None),
        ("out", 8, None),
    ],
)
def test_what_is_not_aligned_is_refused(field, bytes_past, words):
    inputs = make_inputs(replace(PROBLEM, page_size=None), "cpu")
    tensor = getattr(inputs, field)
    memory = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    shifted = memory[bytes_past // 2 :][: tensor.numel()].view(tensor.shape)
    reason = misalignment(replace(inputs, **{field: shifted}))
    assert reason is None if words is None else str(reason).startswith(words)


def test_a_relaunch_takes_caches_that_have_grown(driver):
    first = make_inputs(PROBLEM, "cpu")
    launch = launch_over(first)
    relaunch = cuda.CudaRelaunch(launch)
    call(relaunch, first, 16)
    assert driver.encoded == []
    for tokens in (40, 41):
        driver.encoded.clear()
        k, v = [first.k_cache.new_zeros(1, 1, tokens, 64).transpose(1, 2) for _ in range(2)]
        call(relaunch, replace(first, k_cache=k, v_cache=v), tokens)
        params = driver.launches[-1][0]
        columns, box = launch.build.column_bytes // 2, launch.build.box
        sizes, strides = (64, tokens, 1, 1), (128, 128, 128)
        # UINT16 of rank 4; box of (columns, tokens, 1, 1); swizzled by 128 bytes.
        rest = (*sizes, *strides, columns | box << 32, 1 | 1 << 32, 0, 3, 0, 0)
        # One map is encoded. V's is a copy of it, at V's address.
        words = (1, 4, *rest)
        assert driver.encoded == [(k.data_ptr(), *words)]
        for cache, written in ((k, params.k_map), (v, params.v_map)):
            assert tuple(written.words[:]) == (cache.data_ptr(), *words)
        assert (params.k, params.v) == (k.data_ptr(), v.data_ptr())
        for name in ("k", "v"):
            steps = [
                getattr(params, f"stride_{name}_{axis}") for axis in ("batch", "head", "token")
            ]
            assert steps == [tokens * 64, tokens * 64, 64]
        assert params.context == tokens
    call(relaunch, replace(first, k_cache=v, v_cache=k), 41)
    assert len(driver.encoded) == 1


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 40, 3, 64), (7680, 64, 2560, 1), (128, 5120, 15360)),
        # A dimension of size 1 can have any stride.
        ((1, 40, 1, 64), (1 << 60, 64, 1 << 60, 1), (128, 128, 128)),
    ],
)
def test_a_tensor_map_has_sizes_and_strides_in_bytes(driver, shape, strides, expected):
    rows, tokens, heads, head_dim = shape
    words = cuda_driver.tensor_map(4096, shape, strides, BUILD)
    assert words == driver.encoded[0]
    assert words[:10] == (4096, 1, 4, head_dim, tokens, heads, rows, *expected)
