"""Models of transformers with random weights, made from a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leanbench.core.errors import UserError
from leanbench.core.inputs import torch_dtype
from leanbench.core.llm.config import parsed_config
from leanbench.core.llm.model import read_model
from leanbench.integrations.transformers import version_fault

if TYPE_CHECKING:
    import torch

#: Of weights: far from what a training gives, near enough for every activation to stay finite.
_WEIGHT_STD = 0.02
#: The name under which transformers calls `attention` of a model.
IMPLEMENTATION = "leanbench_decode"


#: The latest model, by what it was made from: problems of one model share it.
_latest: dict[tuple[str, str, str], torch.nn.Module] = {}


def kept_bytes(text: str, dtype: str, device: str) -> int:
    """Return the bytes of this model's weights if it is the latest one; free any other."""
    for key in _latest.keys() - {(text, dtype, device)}:
        del _latest[key]
    weights = [weight for model in _latest.values() for weight in model.parameters()]
    return sum(weight.nbytes for weight in weights)


def random_model(text: str, dtype: str, device: str) -> torch.nn.Module:
    """Return the model of a config, in evaluation mode.

    Args:
        text: See `leanbench.core.llm.model`.

    Raises:
        UserError: transformers is missing, unsupported, or rejects the config.
    """
    if not kept_bytes(text, dtype, device):
        _latest[text, dtype, device] = _made(text, dtype, device)
    return _latest[text, dtype, device]


def _made(text: str, dtype: str, device: str) -> torch.nn.Module:
    if (fault := version_fault()) is not None:
        raise UserError(fault)
    import torch
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import AttentionInterface
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    AttentionInterface.register(IMPLEMENTATION, _attention)
    whole = read_model(text)
    fields = {key: value for key, value in whole.config.items() if key != "model_type"}
    try:
        config, _ = parsed_config(whole.name, CONFIG_MAPPING[whole.model_type], fields)
        with torch.device(device), no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=IMPLEMENTATION, dtype=torch_dtype(dtype)
            )
    except (ValueError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"transformers refuses the config of {text}: {reason}") from None
    # Which no_init_weights leaves out.
    model.tie_weights()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, _WEIGHT_STD, generator=generator)
    return model.eval()


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **call: Any
) -> Any:
    """Call the attention function in the config of a model."""
    attend = module.config.leanbench_attention
    return attend(module, query, key, value, attention_mask, **call), None
