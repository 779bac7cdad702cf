"""Brings a verified model directory into memory, ready for packed forwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from draftline_server.errors import ModelError
from draftline_server.model import attention
from draftline_server.model.cpu_decoder_layer import fuse_decoder_layers
from draftline_server.model.cpu_layers import cast_parameters, compute_dtype, replace_layers

# What forwards return, whatever config.json says of it.
_OUTPUT = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


def load_model(path: Path, *, dtype: torch.dtype, device: torch.device, pack: bool = True) -> PreTrainedModel:
    """Loads weights of `dtype`; on a CPU their linear layers are repacked, on request not.

    Raises `ModelError` where transformers does not find what the checks found.
    """
    attention.register()
    transformers.utils.logging.disable_progress_bar()  # its bars would run through the structured log
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation=attention.IMPLEMENTATION,
        local_files_only=True,
        # Its end tokens are read elsewhere; all else of it is for transformers' own way to generate.
        generation_config=GenerationConfig(),
        output_loading_info=True,
        **_OUTPUT,
    )
    model: PreTrainedModel
    model, found = loaded
    if found["missing_keys"]:  # transformers makes weights up, and warns
        raise ModelError(f"{path}: tensor {min(found['missing_keys'])} was not loaded")
    module: nn.Module = model
    module.to(device).eval().requires_grad_(False)
    if device.type == "cpu" and pack:
        replace_layers(model)  # before the dtype changes: packed weights keep theirs
    cast_parameters(model, compute_dtype(dtype, device))
    if device.type == "cpu" and pack:
        fuse_decoder_layers(model)
    return model
