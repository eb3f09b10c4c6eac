"""Kernels of the libraries that people use, measured as they are. They run where they are asked for by name."""

from leanbench.kernels.libraries.flash_attn_3 import FlashAttn3
from leanbench.kernels.libraries.flash_infer import FlashInfer, FlashInferCudaCores
from leanbench.kernels.libraries.sdpa import Cudnn, TorchFlash

KERNELS = (Cudnn(), TorchFlash(), FlashInfer(), FlashInferCudaCores(), FlashAttn3())
