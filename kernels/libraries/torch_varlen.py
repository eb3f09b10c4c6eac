"""FlashAttention-2 in torch without split-KV: the operator behind `torch.nn.attention.varlen`."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from leanbench.kernels.libraries.library import LibraryKernel, lengths

from leanbench.core.config import KernelConfig
from leanbench.core.kernel import OwnOutputs
from leanbench.core.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from leanbench.core.inputs import AttentionInputs


class TorchFlashNoSplit(LibraryKernel):
    """The kernel of `torch_flash` with one CTA per output tile.

    torch splits contexts by default. With variable lengths it does so only for groups of query
    heads (mha_varlen_fwd in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """

    name = "torch_flash_no_split"
    title = "torch's own FlashAttention-2 without split-KV, a CTA for each output tile"
    decomposition = "one_cta_per_tile"
    source = "Dao 2023, arXiv 2307.08691; the CUDA code in torch"
    written_for = "2.11 to 2.13"
    fits_whole_models = True
    head_dims = (64, 80, 96, 128, 256)
    axes = LibraryKernel.axes | {"lengths", "lengths_on"}

    def refusal(self, problem: AttentionProblem) -> str | None:
        if problem.group_size > 1:
            return (
                f"{self.name} takes a KV head for every query head, not one for"
                f" {problem.group_size} of them: torch would split their contexts"
            )
        return super().refusal(problem)

    def launch(self, inputs: AttentionInputs, config: KernelConfig | None) -> TorchVarlenLaunch:
        return TorchVarlenLaunch(inputs)


class TorchVarlenLaunch(OwnOutputs):
    """A launch over views of the caches: (rows, kv_heads, head_dim), one row per token.

    Sequence b starts at row b * rows_per_sequence. In the HND layout, tokens of other heads lie
    between two sequences.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        import torch

        super().__init__(inputs)
        batch, _, q_heads, head_dim = inputs.q.shape
        per_sequence = _rows_per_sequence(inputs.k_cache)
        starts = partial(_starts, batch, inputs.q.device)
        operator = torch.ops.aten._flash_attention_forward
        names = {argument.name for argument in operator.default._schema.arguments}
        self._attend = partial(
            operator,
            inputs.q.view(batch, q_heads, head_dim),
            _rows(inputs.k_cache, per_sequence),
            _rows(inputs.v_cache, per_sequence),
            starts(1),
            starts(per_sequence),
            1,
            inputs.k_cache.shape[1],
            0.0,
            False,
            False,
            scale=inputs.softmax_scale,
            seqused_k=lengths(inputs),
            # torch 2.11 lacks this argument and splits none of these calls.
            **({"num_splits": 1} if "num_splits" in names else {}),
        )

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        # The LSE is (q_heads, batch).
        out, lse, *_ = self._attend()
        results = self.results
        return out.view(results.q.shape), lse.t().unsqueeze(-1).view(results.lse.shape)


@lru_cache(maxsize=1024)
def _starts(batch: int, device: torch.device, rows: int) -> torch.Tensor:
    """Return the first row of each sequence of `rows` rows, and the end: (batch + 1,), int32.

    It is cached, so layers of a captured step do not each compute it.
    """
    import torch

    return torch.arange(batch + 1, dtype=torch.int32, device=device) * rows


def _rows_per_sequence(cache: torch.Tensor) -> int:
    """Return the number of rows between the first rows of two sequences."""
    rows, remainder = divmod(cache.stride(0), cache.stride(1))
    assert remainder == 0, f"a cache with strides {cache.stride()} is no whole number of rows"
    return rows


def _rows(cache: torch.Tensor, per_sequence: int) -> torch.Tensor:
    batch, tokens, heads, head_dim = cache.shape
    rows = (batch - 1) * per_sequence + tokens
    return cache.as_strided((rows, heads, head_dim), cache.stride()[1:])
