"""The LeanAttention paper's claims as data.

Sanovar et al. 2024 (arXiv 2405.10480), measured on an A100-80GB (108 SMs), fp16, with
FlashAttention 2.5.6's kernels: LA is LeanAttention, FA2 one CTA per output tile, FD FlashDecoding
with that version's heuristic, FI FlashInfer. `leanbench.paper.claim.BASELINES` has their
counterparts here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from leanbench.core.lengths import draw_context
from leanbench.core.llm.model import read_model
from leanbench.core.problem import AttentionProblem
from leanbench.paper.claim import SAMPLES, Claim, Relation, Role, Statistic


def _mha(heads: int, context_k: int, head_dim: int = 64, batch: int = 1) -> AttentionProblem:
    return AttentionProblem(batch, heads, heads, context_k * 1024, head_dim)


_CONTEXTS_K = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_FIG_7A = tuple(_mha(56, context) for context in _CONTEXTS_K)
_FIG_4 = tuple(
    _mha(heads, context) for heads in (16, 24, 32, 48, 56, 64) for context in _CONTEXTS_K[3:]
)
#: The text does not give heads and context of figure 7c, heads of figure 9, and batches, heads and
#: context of figure 11. They are chosen so that FA2's CTAs over the SMs come near the ratio that
#: the paper gives.
_FIG_7C = tuple(_mha(24, 64, batch=batch) for batch in (1, 2, 4, 8, 16))
_FIG_9 = tuple(_mha(32, context, head_dim=128) for context in _CONTEXTS_K)
_FIG_11 = {
    batch: tuple(
        AttentionProblem(batch, 32, 32, draw_context(f"mean-{share}", batch, 65_536), 64)
        for share in (1.0, 0.8, 0.6, 0.4, 0.2)
    )
    for batch in (8, 16, 32)
}
#: Tensor parallel on eight GPUs; the text does not give the context of figure 8c.
_FIG_8A = tuple(
    AttentionProblem(4, 192, 192, context * 1024, 64, parallel="tp:8") for context in _CONTEXTS_K
)
_FIG_8B = AttentionProblem(4, 64, 64, 262_144, 64, parallel="tp:8")
_FIG_8C = AttentionProblem(1, 128, 128, 65_536, 64, parallel="tp:8")


@cache
def _samples() -> tuple[AttentionProblem, ...]:
    """Draw batch, context and heads uniformly, among problems that fit an 80 GB GPU."""
    draw = random.Random(2405)
    samples: list[AttentionProblem] = []
    while len(samples) < SAMPLES:
        problem = _mha(
            draw.choice((8, 16, 24, 32, 48, 56, 64)),
            draw.choice(_CONTEXTS_K),
            batch=draw.choice((1, 2, 4)),
        )
        if problem.kv_bytes < 60e9:
            samples.append(problem)
    return tuple(samples)


#: Kernels of a speedup: numerator, denominator.
_LA_OVER_FD: tuple[Role, Role] = ("FD", "LA")
_LA_OVER_FA2: tuple[Role, Role] = ("FA2", "LA")
_FD_OVER_FA2: tuple[Role, Role] = ("FA2", "FD")
_LA_OVER_FI: tuple[Role, Role] = ("FI", "LA")


def _speedup(
    figure: str,
    words: str,
    kernels: tuple[Role, Role],
    problems: Sequence[AttentionProblem],
    paper: float,
    relation: Relation = "about",
    statistic: Statistic = "mean",
) -> Claim:
    return Claim(figure, words, "latency", *kernels, statistic, tuple(problems), paper, relation)


def _over_flashinfer(figure: str, words: str, problems: Sequence[AttentionProblem]) -> Claim:
    """Build the claim that LA is faster than FlashInfer. The paper gives no figure for it."""
    words = f"LA over FlashInfer, mean of {words}"
    return _speedup(figure, words, _LA_OVER_FI, problems, 1, "at least")


def _occupancy(
    words: str, kernel: Role, statistic: Statistic, paper: float, relation: Relation
) -> Claim:
    return Claim("4", words, "occupancy", kernel, None, statistic, _FIG_4, paper, relation)


def _energy(
    words: str, over: Role, problems: Sequence[AttentionProblem], statistic: Statistic = "mean"
) -> Claim:
    """Build the claim that LA takes no more energy than `over`."""
    return Claim("13", words, "energy", "LA", over, statistic, tuple(problems), 1.0, "at most")


#: Figure 3 names no model; figure 10 has OPT-1.3B and 6.7B, here with more than their 2048
#: positions, for the longest request.
_FIG_3 = ("opt-6.7b:positions=17408", "llama-3-8b:positions=17408")
_FIG_10 = ("opt-1.3b:positions=182272", "opt-6.7b:positions=182272")


def _requests(
    models: Sequence[str], prompt: int, outputs: Sequence[int]
) -> tuple[AttentionProblem, ...]:
    """Return the middle step of each output, by model."""
    problems = []
    for model in models:
        q_heads, kv_heads, head_dim = read_model(model).heads
        for tokens in outputs:
            context = prompt + tokens // 2
            problems.append(
                AttentionProblem(1, q_heads, kv_heads, context, head_dim, whole_model=model)
            )
    return tuple(problems)


def _decode_share(words: str, output: int, paper: float) -> Claim:
    problems = _requests(_FIG_3, 1024, [output])
    return Claim(
        "3", words, "decode share", "LA", None, "lowest", problems, paper, "at least", 1024
    )


def _request(
    words: str,
    kernels: tuple[Role, Role],
    models: Sequence[str],
    outputs: Sequence[int],
    paper: float,
) -> Claim:
    problems = _requests(models, 50 * 1024, outputs)
    return Claim("10", words, "request", *kernels, "mean", problems, paper, "about", 50 * 1024)


def claims() -> tuple[Claim, ...]:
    """Return all claims in the paper's order, with the same samples in every call."""
    fd, fa2, fd_fa2, samples = _LA_OVER_FD, _LA_OVER_FA2, _FD_OVER_FA2, _samples()
    past_8k = "LA over FA2 past 8k, 56 heads, batch 1, head_dim 64"
    fewest = "LA over FA2 at the fewest heads (8 here), 64k, batch 1, head_dim 64"
    flat = "FD over FA2 flat past 32k: highest over lowest"
    depends = "occupancy of FD depends on the problem: highest over lowest"
    uneven = "LA over FD grows as a batch of {} gets more uneven: mean/max 0.2 over 1.0"
    grows = "the gap to {0} grows past 128k: LA over {0}, 512k over 128k"
    lowest = f"lowest of {SAMPLES} samples"
    past_64k = [65536, 98304, 131072]
    share = "decode's share of a request with LA, prompt of 1024, {} output tokens"
    opt = "OPT-1.3B and 6.7B, prompt of 50k, 64k to 128k output tokens"
    return (
        _speedup("abstract", "LA over FD, mean of the samples", fd, samples, 1.73),
        _speedup("abstract", "LA over FD at 256k, 56 heads", fd, _FIG_7A[8:9], 2.18),
        _over_flashinfer("abstract", "the samples", samples),
        _decode_share(share.format("16"), 16, 0.8),
        _decode_share(share.format("16k"), 16384, 0.99),
        _occupancy("occupancy of LA near 100% everywhere", "LA", "lowest", 0.9, "at least"),
        _occupancy("occupancy of FA2 is low", "FA2", "mean", 0.6, "at most"),
        _occupancy(depends, "FD", "highest over lowest", 1.2, "at least"),
        _speedup("7a", past_8k, fa2, _FIG_7A[4:], 2, "at least", "lowest"),
        _speedup("7a", "LA over FA2 at 512k", fa2, _FIG_7A[9:], 2.46),
        _speedup("7a", "FD over FA2 at 512k", fd_fa2, _FIG_7A[9:], 2.06),
        _speedup("7a", flat, fd_fa2, _FIG_7A[5:], 1.1, "at most", "highest over lowest"),
        _over_flashinfer("7a", "1k to 512k", _FIG_7A),
        _speedup("7b", fewest, fa2, [_mha(8, 64)], 12.5),
        _speedup("7b", "LA over FA2 at 64 heads", fa2, [_mha(64, 64)], 2.15),
        _over_flashinfer("7b", "8 and 64 heads", [_mha(8, 64), _mha(64, 64)]),
        _speedup("7c", "LA over FA2 at batch 1 (24 heads, 64k here)", fa2, _FIG_7C[:1], 4.71),
        _speedup("7c", "LA over FD at batch 1", fd, _FIG_7C[:1], 1.06),
        _speedup("7c", "LA over FA2 at large batch (16)", fa2, _FIG_7C[4:], 1.5),
        _speedup("7c", "LA over FD at large batch (16)", fd, _FIG_7C[4:], 1.5),
        _over_flashinfer("7c", "batch 1 and 16", [_FIG_7C[0], _FIG_7C[4]]),
        _speedup("8a", "LA over FA2 past 64k, 192 heads, batch 4, 8 GPUs", fa2, _FIG_8A[7:], 1.7),
        _speedup("8a", "LA over FA2 up to 64k", fa2, _FIG_8A[:7], 1.28, "at least", "lowest"),
        _speedup("8b", "LA over FA2 at 64 heads, 256k, batch 4, 8 GPUs", fa2, [_FIG_8B], 4.18),
        _speedup("8c", "LA over FA2 at batch 1, 128 heads (64k here), 8 GPUs", fa2, [_FIG_8C], 7.8),
        _speedup("text", f"LA over FA2, mean of {SAMPLES} samples", fa2, samples, 2.6),
        _speedup("text", "LA over FA2, highest: 16 heads, 512k", fa2, [_mha(16, 512)], 8.33),
        _speedup("text", "LA over FA2, lowest: 24 heads, 1k", fa2, [_mha(24, 1)], 1.1),
        _speedup("text", f"LA over FD, mean of {SAMPLES} samples", fd, samples, 1.27),
        _speedup("text", "LA over FD, highest: 24 heads, 512k", fd, [_mha(24, 512)], 1.71),
        _speedup("text", "LA over FD, lowest: 24 heads, 1k", fd, [_mha(24, 1)], 0.99),
        _speedup(
            "text", f"LA always as fast as FA2: {lowest}", fa2, samples, 1, "at least", "lowest"
        ),
        _speedup(
            "text", f"LA always as fast as FD: {lowest}", fd, samples, 1, "at least", "lowest"
        ),
        _speedup("9", "LA over FA2, head_dim 128, 512k (32 heads here)", fa2, _FIG_9[9:], 3.67),
        _speedup("9", "LA over FA2, head_dim 128, 1k", fa2, _FIG_9[:1], 1.2),
        _over_flashinfer("9", "1k and 512k, head_dim 128", [_FIG_9[0], _FIG_9[9]]),
        _request(
            "request with LA over FA2, OPT-1.3B, prompt of 50k, 1k output tokens",
            fa2,
            _FIG_10[:1],
            [1024],
            1.26,
        ),
        _request(f"request with LA over FA2, {opt}", fa2, _FIG_10, past_64k, 4.0),
        _request(f"request with LA over FD, {opt}", fd, _FIG_10, past_64k, 1.06),
        *(
            _speedup("11", uneven.format(batch), fd, shapes, 1.0, "at least", "last over first")
            for batch, shapes in _FIG_11.items()
        ),
        *(
            _over_flashinfer("11", f"mean/max 0.2 to 1.0, batch {batch}", shapes)
            for batch, shapes in _FIG_11.items()
        ),
        _energy("energy of LA over FD at 512k, 56 heads", "FD", _FIG_7A[9:]),
        _energy("energy of LA over FA2 at 512k", "FA2", _FIG_7A[9:]),
        _energy("energy of LA over FlashInfer at 512k", "FI", _FIG_7A[9:]),
        _energy(grows.format("FD"), "FD", _FIG_7A[7:], "last over first"),
        _energy(grows.format("FlashInfer"), "FI", _FIG_7A[7:], "last over first"),
    )
