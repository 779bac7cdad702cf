"""Takes hidden states out of an unmodified model while it computes a forward.

Layer id ``i`` names what layer ``i`` reads (0: the embeddings), and the number of layers what the last
one gives, before the final norm. That is how published EAGLE-3 heads count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MAX_KEPT_TOKENS = 128
"""Of a request whose hidden states nobody reads for the time being, this many are kept."""


class HiddenStateTap:
    """Hooks on the named layers of one model; they do nothing but while `taking`."""

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]) -> None:
        layers = decoder_layers(model)
        self._taken: list[Tensor] | None = None
        self._num_taken = len(layer_ids)
        for place, layer_id in enumerate(layer_ids):
            if layer_id < len(layers):
                layers[layer_id].register_forward_pre_hook(partial(self._take_input, place), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(self._take_output, place))

    @contextmanager
    def taking(self) -> Iterator[None]:
        """The forward in this context leaves its hidden states here until `hidden_states`."""
        self._taken = [torch.empty(0)] * self._num_taken
        try:
            yield
        except BaseException:
            self._taken = None
            raise

    def hidden_states(self) -> Tensor:
        """What the last forward left, ``[tokens, layers * hidden size]``, and forgets it."""
        assert self._taken is not None, "nothing was taken"
        taken, self._taken = self._taken, None
        return torch.cat([states[0] for states in taken], dim=-1)

    def _take_input(self, place: int, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._taken is not None:
            self._taken[place] = args[0] if args else kwargs["hidden_states"]

    def _take_output(self, place: int, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if self._taken is not None:
            self._taken[place] = output[0] if isinstance(output, tuple) else output


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's layers, which architectures keep under different names."""
    num_layers = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    assert found, f"{type(model).__name__} has no list of {num_layers} layers"
    return found[0]
