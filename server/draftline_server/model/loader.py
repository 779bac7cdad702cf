"""Brings a verified model directory into memory, ready for packed forwards."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from draftline_server.model import attention
from draftline_server.model.cpu_decoder_layer import fuse_decoder_layers
from draftline_server.model.cpu_layers import cast_parameters, compute_dtype, replace_layers

# What forwards return, whatever config.json says of it.
_OUTPUT = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


def load_model(path: Path, *, dtype: torch.dtype, device: torch.device, pack: bool = True) -> PreTrainedModel:
    """Loads weights of `dtype`; on a CPU their linear layers are repacked, on request not."""
    attention.register()
    transformers.utils.logging.disable_progress_bar()  # its bars would run through the structured log
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=attention.IMPLEMENTATION,
        local_files_only=True,
        **_OUTPUT,
    )
    module: nn.Module = model
    module.to(device).eval().requires_grad_(False)
    if device.type == "cpu" and pack:
        replace_layers(model)  # before the dtype changes: packed weights keep theirs
    cast_parameters(model, compute_dtype(dtype, device))
    if device.type == "cpu" and pack:
        fuse_decoder_layers(model)
    return model
