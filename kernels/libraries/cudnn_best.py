"""cuDNN in its best mode."""

from __future__ import annotations

from dataclasses import dataclass

from leanbench.kernels.libraries.best_mode import BestMode
from leanbench.kernels.libraries.cudnn_frontend import CudnnFrontend, CudnnFrontendLse
from leanbench.kernels.libraries.sdpa import Cudnn, CudnnLse

from leanbench.core.config import KernelConfig, word

_MODES = (Cudnn(), CudnnLse(), CudnnFrontend(), CudnnFrontendLse())


@dataclass(frozen=True)
class CudnnMode(KernelConfig):
    """API through which cuDNN is called."""

    mode: str = word(*(mode.name for mode in _MODES))


class CudnnBest(BestMode):
    """cuDNN in its best mode. Only the output is checked: not every mode writes an LSE."""

    name = "cudnn_best"
    title = (
        "cuDNN's attention, the fastest of torch's call and its own front end's, each with and"
        " without the LSE, timed in every cell; the config names it"
    )
    source = "NVIDIA cuDNN, the version that torch loads"
    modes = _MODES
    head_dims = CudnnFrontend.head_dims
    max_q_len = CudnnFrontend.max_q_len
    axes = CudnnFrontend.axes
    lse_base = None
    config_types = (CudnnMode,)
