"""What MTP modules start from, and which of their parts stay as they start.

    random             the constructor's values
    target_last_layer  the target's last decoder layer
    native             the target's own MTP layers, more modules than it has as copies of them
    replicate          copies of one trained module (MiMo's recipe: train one, then tune copies)
    auto               native where the target's checkpoint holds modules that can be trained as the
                       configuration says, else target_last_layer

Source: MiMo (arXiv:2505.07608) for `replicate`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple, cast

import torch
from torch import nn

from mtp_research.heads.native import (
    SINGLE_FILE,
    has_native_heads,
    misfits,
    num_published_modules,
    num_stored_modules,
    read_native,
)
from mtp_research.heads.record import CONVENTIONS
from mtp_research.heads.stack import HeadSpec, MTPHeads, MTPModule
from mtp_research.heads.weights import native_folder, read_tensors
from mtp_research.models.block import LayerStack, layers_like_block
from mtp_research.models.fp8_layers import plain_state
from mtp_research.models.loading.source import CONFIG_FILE
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, IntegrityError

Init = Literal["auto", "native", "random", "replicate", "target_last_layer"]

_MODULES = "mtp_modules"


class Start(NamedTuple):
    """What modules start from."""

    init: Init  # never auto
    phrase: str  # which and why, for people and for `head.json`


def choose_start(target: Target, spec: HeadSpec, *, init: Init) -> Start:
    """What `head.init` stands for, for heads of `spec` on `target`."""
    count = spec.num_mtp_modules
    wanted = f"{count} module{'s' * (count != 1)}"
    if init != "auto":
        return Start(init, f"{init} ({wanted})")
    if obstacle := _native_obstacle(target, spec):
        return Start("target_last_layer", f"target_last_layer ({wanted}): {obstacle}")
    return Start("native", f"native ({wanted}): the target's checkpoint holds MTP modules")


def _native_obstacle(target: Target, spec: HeadSpec) -> str | None:
    """Why the target's own modules cannot be the start; None where they can."""
    folder = native_folder(target.path, target) if target.path else None
    num_stored = 0
    if folder is not None and (folder / CONFIG_FILE).is_file():
        num_stored = num_stored_modules(folder, target)
    if num_stored == 0:
        return "the target's checkpoint holds no MTP modules"
    if target.family.owns_lm_head:
        return "the target's MTP modules have output heads of their own, which are not trained"
    if differing := _misfits(target, spec, num_published=num_stored):
        fixes = " ".join(f"head.{name}={value}" for name, value in differing.items())
        return f"the target's MTP modules are {fixes}"
    return None


def init_heads(
    heads: MTPHeads, *, init: Init, path: Path | None = None, noise: float = 0.0, seed: int = 0
) -> None:
    """Initialise freshly built heads in place, as the module says.

    `path` is a folder of heads with one module, for `replicate`. `noise`, for `target_last_layer`,
    is the standard deviation of what is added to each matrix, relative to its root mean square.
    """
    if init == "auto":
        init = choose_start(heads.target, heads.spec, init=init).init
    if init == "target_last_layer":
        _copy_last_layer(heads)
        if noise:
            _add_noise(heads, relative_std=noise, seed=seed)
    elif init == "native":
        folder = native_folder(heads.target.path, heads.target)
        _check_native_conventions(heads, folder)
        read_native(heads, folder=folder)
    elif init == "replicate":
        replicate_module(heads, path=path)


def replicate_module(heads: MTPHeads, *, path: Path | None) -> None:
    """Give each module the weights of the one module in `path`, in place."""
    if path is None:
        raise ConfigError("head.init=replicate needs head.path, a folder of heads with one module.")
    tensors = read_tensors(path / SINGLE_FILE)
    first, others = f"{_MODULES}.0.", [n for n in tensors if not n.startswith(f"{_MODULES}.0.")]
    if others:
        raise ConfigError(
            f"head.init=replicate needs heads with one module, {str(path)!r} has more "
            f"({others[0]}); set head.path to heads trained with head.num_mtp_modules=1."
        )
    own = {name.removeprefix(first): tensor for name, tensor in tensors.items()}
    for module in heads.mtp_modules:
        try:
            module.load_state_dict(own)
        except RuntimeError as fault:
            reason = " ".join(str(fault).split())
            raise IntegrityError(
                f"{path}: its module does not fit this target: {reason}"
            ) from fault


def freeze_parts(heads: MTPHeads, *, patterns: Sequence[str]) -> list[str]:
    """Stop training the parameters that match, in place, and return their names.

    A pattern is a dotted part of the name, such as `experts` or `mtp_modules.0`, or a shell pattern
    over the whole name, such as `*.block.self_attn.*`.
    """
    frozen: dict[str, None] = {}
    named = dict(heads.named_parameters())
    for pattern in patterns:
        matching = [name for name in named if _matches(name, pattern)]
        if not matching:
            parts = sorted({part for name in named for part in name.split(".") if part.isalpha()})
            raise ConfigError(
                f"head.freeze must name parts of the modules, {pattern!r} matches none; parts are "
                f"{', '.join(parts)}."
            )
        frozen |= dict.fromkeys(matching)
    if len(frozen) == len(named):
        raise ConfigError(f"head.freeze={list(patterns)} leaves no parameter to train; name fewer.")
    for name in frozen:
        named[name].requires_grad_(False)
    return list(frozen)


def _matches(name: str, pattern: str) -> bool:
    return f".{pattern}." in f".{name}." or fnmatchcase(name, pattern)


def _copy_last_layer(heads: MTPHeads) -> None:
    """Copy every tensor of the target's last decoder layer whose name and shape match.

    Which layer that is, `block.layers_like_block` says.

    The final norm goes into `hnorm`'s place after the block; `eh_proj` starts as the average of its
    two inputs, so that the untrained module already passes a usable hidden state.
    """
    base = heads.target.model.base_model
    layers = cast(nn.ModuleList, base.layers)
    sources = [layers[n] for n in layers_like_block(heads.target.model, heads.target.family)]
    final_norm = getattr(base, heads.target.family.final_norm).state_dict()
    for module in cast(Iterable[MTPModule], heads.mtp_modules):
        stack = module.block.layers if isinstance(module.block, LayerStack) else [module.block]
        for source, layer in zip(sources, stack, strict=True):
            _copy_matching(source, layer)
        if module.shared_head is not None:
            module.shared_head.norm.load_state_dict(final_norm)
        weight = module.eh_proj.weight
        half = torch.eye(len(weight), dtype=weight.dtype, device=weight.device) / 2
        with torch.no_grad():
            weight.copy_(torch.cat((half, half), dim=1))


@torch.no_grad()
def _add_noise(heads: MTPHeads, *, relative_std: float, seed: int) -> None:
    """Set modules and seeds apart; norms and biases, which are small and scale all, stay."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU, so that devices start alike
    for parameter in heads.parameters():
        if parameter.dim() > 1:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            rms = parameter.float().square().mean().sqrt()
            parameter.copy_(parameter.float() + relative_std * rms * noise)


def _copy_matching(source: nn.Module, block: nn.Module) -> None:
    tensors = plain_state(source, dtype=next(block.parameters()).dtype)
    matching = {
        name: tensors[name]
        for name, tensor in block.state_dict().items()
        if name in tensors and tensors[name].shape == tensor.shape
    }
    block.load_state_dict(matching, strict=False)


def _check_native_conventions(heads: MTPHeads, folder: Path) -> None:
    """The target must have MTP layers, and they are run as their family runs them."""
    if not has_native_heads(folder, heads.target):
        raise ConfigError(
            f"head.init=native needs a target with MTP layers of its own, {heads.target.path!r} "
            "has none; set head.init=target_last_layer."
        )
    if heads.target.family.owns_lm_head:
        raise ConfigError(
            f"modules of {str(folder)!r} have output heads of their own, which are decoded and not "
            "trained; set head.init=target_last_layer, which trains on the target's lm_head."
        )
    num_published = num_published_modules(folder, heads.target)
    if differing := _misfits(heads.target, heads.spec, num_published=num_published):
        got = ", ".join(f"head.{name}={getattr(heads.spec, name)}" for name in differing)
        fixes = " ".join(f"head.{name}={value}" for name, value in differing.items())
        raise ConfigError(
            f"head.init=native must have the modules of {str(folder)!r} or more, run as their "
            f"family runs them, got {got}; set {fixes}."
        )


def _misfits(target: Target, spec: HeadSpec, *, num_published: int) -> dict[str, object]:
    """Keys of `head`, and the values that the target's own modules need."""
    published = {name: getattr(target.family, name) for name in CONVENTIONS}
    return misfits(asdict(spec), published | {"num_mtp_modules": num_published})
