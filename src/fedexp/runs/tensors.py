"""The state of a simulation as named tensors, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedexp.client import Tensors
from fedexp.engine import SimulationState
from fedexp.objective import Buffers


def model_tensors(state: SimulationState) -> dict[str, Tensor]:
    """All tensors of a state but those of the clients, by name."""
    named = {"params": state.params, **_named_buffers("buffers", state.buffers)}
    for k, (params, buffers) in enumerate(state.recent):
        named |= {f"recent/{k}/params": params, **_named_buffers(f"recent/{k}", buffers)}
    named |= {f"server/{name}": value for name, value in state.server.items()}
    return named | {f"shared/{name}": value for name, value in state.shared.items()}


def client_tensors(state: SimulationState, clients: Iterable[int]) -> dict[str, Tensor]:
    """What the clients keep, by client and name."""
    return {f"{c}/{name}": value for c in clients for name, value in state.clients[c].items()}


def state_from(
    round: int, steps: int, named: Mapping[str, Tensor], clients: Mapping[int, Tensors]
) -> SimulationState:
    """The state that `model_tensors` took apart."""
    iterates = sum(name.startswith("recent/") and name.endswith("/params") for name in named)
    recent = [
        (named[f"recent/{k}/params"], _buffers(named, f"recent/{k}")) for k in range(iterates)
    ]
    return SimulationState(
        round=round,
        steps=steps,
        params=named["params"],
        buffers=_buffers(named, "buffers"),
        recent=tuple(recent),
        server=_section(named, "server/"),
        shared=_section(named, "shared/"),
        clients=clients,
    )


def clients_from(named: Mapping[str, Tensor], clients: Iterable[int]) -> dict[int, Tensors]:
    """The states of these clients among the named tensors."""
    by_client: dict[int, dict[str, Tensor]] = {}
    for full, value in named.items():
        client, _, name = full.partition("/")
        by_client.setdefault(int(client), {})[name] = value
    return {client: by_client[client] for client in clients}


def to_bytes(named: Mapping[str, Tensor]) -> bytes:
    """A safetensors file; every tensor gets memory of its own, as the format wants it."""
    from safetensors.torch import save

    own = {name: value.detach().cpu().contiguous().clone() for name, value in named.items()}
    return save(own, {"format": "pt"})


def from_bytes(data: bytes, device: torch.device) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the device; `ValueError` where it is none."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        named = load(data)
    except (SafetensorError, LookupError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a file of tensors ({type(error).__name__})") from error
    return {name: value.to(device) for name, value in named.items()}


def _named_buffers(prefix: str, buffers: Buffers) -> dict[str, Tensor]:
    return {f"{prefix}/averaged": buffers.averaged, f"{prefix}/kept": buffers.kept}


def _buffers(named: Mapping[str, Tensor], prefix: str) -> Buffers:
    return Buffers(named[f"{prefix}/averaged"], named[f"{prefix}/kept"])


def _section(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): v for name, v in named.items() if name.startswith(prefix)}
