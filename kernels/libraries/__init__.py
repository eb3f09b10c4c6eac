"""Adapters of widely used attention libraries, measured unchanged and run only on request."""

from leanbench.kernels.libraries.best_mode import CudnnBest, FlashInferBest
from leanbench.kernels.libraries.cudnn_frontend import CudnnFrontend, CudnnFrontendLse
from leanbench.kernels.libraries.flash_attn_2 import FlashAttn, FlashDecoding
from leanbench.kernels.libraries.flash_attn_3 import FlashAttn3, FlashAttn3Best
from leanbench.kernels.libraries.flash_infer import (
    FlashInfer,
    FlashInferCudaCores,
    FlashInferPersistent,
)
from leanbench.kernels.libraries.flash_infer_cascade import FlashInferCascade
from leanbench.kernels.libraries.flash_infer_mla import FlashInferMla
from leanbench.kernels.libraries.flash_infer_single import (
    FlashInferSingle,
    FlashInferSingleCudaCores,
)
from leanbench.kernels.libraries.flash_infer_xqa import FlashInferXqa
from leanbench.kernels.libraries.flash_mla_dense import FlashMla, FlashMlaSparse
from leanbench.kernels.libraries.flex import TorchFlex
from leanbench.kernels.libraries.sdpa import Cudnn, CudnnLse, TorchEfficient, TorchFlash, TorchMath
from leanbench.kernels.libraries.standard import Standard
from leanbench.kernels.libraries.torch_varlen import TorchFlashNoSplit
from leanbench.kernels.libraries.xformers_split_k import XformersSplitK

KERNELS = (
    Cudnn(),
    CudnnLse(),
    CudnnFrontend(),
    CudnnFrontendLse(),
    CudnnBest(),
    TorchFlash(),
    TorchFlashNoSplit(),
    TorchEfficient(),
    TorchMath(),
    TorchFlex(),
    Standard(),
    FlashAttn(),
    FlashDecoding(),
    FlashAttn3(),
    FlashAttn3Best(),
    FlashInferBest(),
    FlashInfer(),
    FlashInferCudaCores(),
    FlashInferPersistent(),
    FlashInferSingle(),
    FlashInferSingleCudaCores(),
    FlashInferXqa(),
    FlashInferCascade(),
    FlashInferMla(),
    FlashMla(),
    FlashMlaSparse(),
    XformersSplitK(),
)
