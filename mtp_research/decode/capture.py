"""What a CUDA graph of the whole step cannot hold, refused by name before one is captured.

Letters: none.
"""

from collections.abc import Sequence

from torch import nn

from mtp_research.config import EngineConfig
from mtp_research.decode.draft import MTPDrafter
from mtp_research.decode.step import DeviceStep
from mtp_research.errors import ConfigError, EnvironmentFault
from mtp_research.models.experts import expert_stacks

_STACK_DIM = 3  # of the weights of a layer's experts, [E, out, in]


def require_capturable(step: DeviceStep, *, engine: EngineConfig) -> None:
    """Refuse targets, machines and settings with which `engine.cuda_graphs=true` cannot work.

    Args:
        step: what would be captured.
        engine: its settings.

    Raises:
        ConfigError: a layer that reads the host, or settings that a captured step cannot follow.
        EnvironmentFault: there is no GPU.
    """
    target = step.target
    if target.has_recurrent_state:
        raise ConfigError(
            "engine.cuda_graphs=true does not support recurrent layers, got family "
            f"{target.family_name}; set engine.cuda_graphs=false engine.compile=false."
        )
    models: list[nn.Module] = [target.model]
    if isinstance(step.drafter, MTPDrafter):
        models.append(step.drafter.heads)
    require_no_host_loop(models, family_name=target.family_name)
    if target.device.type != "cuda":
        raise EnvironmentFault(
            f"engine.cuda_graphs=true needs the model on a CUDA GPU, got {target.device}; "
            "set engine=auto."
        )
    if engine.audit or not engine.deferred_output:
        raise ConfigError(
            "engine.cuda_graphs=true needs engine.deferred_output=true and engine.audit=false, got "
            f"{engine.deferred_output} and {engine.audit}; set engine=h200."
        )
    if not engine.deterministic:  # which has a grouped product of its own
        require_grouped_experts(models, dtype=str(target.dtype).removeprefix("torch."))


def require_no_host_loop(models: Sequence[nn.Module], *, family_name: str) -> None:
    """Refuse experts that the library runs in a loop of its own and in no other way.

    The loop asks the device which experts were chosen, and a graph cannot answer.

    Args:
        models: target and heads, without recurrent layers.
        family_name: of the target, for the message.

    Raises:
        ConfigError: names the family and the class.
    """
    for model in models:
        known = {id(stack) for stack in expert_stacks(model)}
        for module in model.modules():
            has_stack = any(p.dim() == _STACK_DIM for p in module.parameters(recurse=False))
            if has_stack and id(module) not in known:
                raise ConfigError(
                    "engine.cuda_graphs=true needs experts that run without the host, got family "
                    f"{family_name}, whose {type(module).__name__} has stacked weights that "
                    "transformers runs in a Python loop; set engine.cuda_graphs=false "
                    "engine.compile=false."
                )


def require_grouped_experts(models: Sequence[nn.Module], *, dtype: str) -> None:
    """Refuse the loop over experts where the library has a grouped product as well.

    Args:
        models: target and heads.
        dtype: of the target, for the message: another than bfloat16 is why the loop runs.

    Raises:
        ConfigError: names the dtype.
    """
    for stack in (stack for model in models for stack in expert_stacks(model)):
        if stack.config._experts_implementation == "eager":
            raise ConfigError(
                "engine.cuda_graphs=true needs model.dtype=bfloat16 for a target with experts, got "
                f"{dtype}, in which transformers runs {type(stack).__name__} in a Python loop; set "
                "model.dtype=bfloat16, engine=h200_deterministic, or engine.cuda_graphs=false "
                "engine.compile=false."
            )
