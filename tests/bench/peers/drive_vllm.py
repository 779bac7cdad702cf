"""vLLM's CPU build as a peer: its offline engine, in this process. Run by the peer's interpreter.

Prefix caching is off, as in every arm: prompts repeat between runs. Compilation stays as vLLM
ships it for CPUs, which is its best.
"""

from __future__ import annotations

import argparse
import os

from environment import peer_dir
from protocol import Peer, claim_stdout, serve

# All read by vLLM when it is imported. In-process, because a spinning idle worker would slow the
# arms that run in between; offline, because nothing is to be fetched.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Compiled once (minutes) and kept beside the environment.
os.environ.setdefault("VLLM_CACHE_ROOT", str(peer_dir("vllm") / "compiled"))


def start(model: str, *, dtype: str, max_streams: int, num_speculative_tokens: int) -> Peer:
    import torch
    import vllm

    speculation = (
        {
            "method": "ngram",
            "num_speculative_tokens": num_speculative_tokens,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
        if num_speculative_tokens
        else None
    )
    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=max_streams,
        # Its start computes a step of this size, which takes minutes where the dtype is emulated.
        max_num_batched_tokens=2048 if max_streams > 1 else 512,
        enable_prefix_caching=False,
        disable_log_stats=True,
        speculative_config=speculation,
        seed=0,
    )

    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    kind = f", n-gram with drafts of {num_speculative_tokens}" if num_speculative_tokens else ""
    threads = f"{torch.get_num_threads()} threads"
    return Peer(f"vLLM {vllm.__version__}, CPU build, {dtype}, {threads}{kind}", generate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-streams", type=int, default=32)
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    arguments = parser.parse_args()
    answers = claim_stdout()
    peer = start(
        arguments.model,
        dtype=arguments.dtype,
        max_streams=arguments.max_streams,
        num_speculative_tokens=arguments.num_speculative_tokens,
    )
    serve(peer, answers)


if __name__ == "__main__":
    main()
