"""`transformers` as it comes: static batches, left-padded, and prompt lookup for one prompt.

In a process of its own like every peer, so that it waits for its threads as torch does by default.
"""

from __future__ import annotations

import argparse

import torch
import transformers

from protocol import Peer, claim_stdout, serve

PAD_TOKEN_ID = 0


def start(model: str, *, dtype: str, threads: int, num_lookup_tokens: int) -> Peer:
    """Prompt lookup takes one prompt at a time; it is on where `num_lookup_tokens` is above 0."""
    torch.set_num_threads(threads)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    options = {"prompt_lookup_num_tokens": num_lookup_tokens} if num_lookup_tokens else {}

    @torch.inference_mode()
    def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = [[PAD_TOKEN_ID] * (longest - len(ids)) + ids for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        output = loaded.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=PAD_TOKEN_ID,
            eos_token_id=[],  # never ends early, as ignore_eos elsewhere
            **options,
        )
        outputs: list[list[int]] = output[:, longest:].tolist()
        return outputs

    kind = f", prompt lookup with drafts of {num_lookup_tokens}" if num_lookup_tokens else ""
    return Peer(f"transformers {transformers.__version__}, {dtype}, {threads} threads{kind}", generate)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--num-lookup-tokens", type=int, default=0)
    arguments = parser.parse_args()
    answers = claim_stdout()
    peer = start(
        arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        num_lookup_tokens=arguments.num_lookup_tokens,
    )
    serve(peer, answers)


if __name__ == "__main__":
    main()
