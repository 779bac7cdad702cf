"""The command line: `draftline-server serve` and `draftline-server generate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from draftline_server import __version__
from draftline_server.config import Config, load_config, parse_config, with_overrides
from draftline_server.errors import ConfigError, StartupError
from draftline_server.log import configure_logging

EXIT_FAILED = 1
EXIT_STARTUP = 2
EXIT_INTERRUPTED = 130

# Flag of `serve`, key that it overrides, type, help.
_OVERRIDES: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("--host", "server.host", str, "address to listen on"),
    ("--grpc-port", "server.grpc_port", int, "gRPC port; 0 takes a free one and logs it"),
    ("--admin-port", "server.admin_port", int, "port of /metrics, /healthz and /readyz; 0 takes a free one"),
    ("--device", "device", str, "auto, cpu or cuda"),
    ("--max-context-length", "inference.max_context_length", int, "prompt and output together, in tokens"),
    ("--kv-cache-memory", "inference.kv_cache_memory", str, "size of the KV cache, such as 4GiB"),
    (
        "--num-speculative-tokens",
        "speculative_decoding.num_speculative_tokens",
        int,
        "longest draft; 0 switches speculation off",
    ),
    ("--log-level", "observability.log_level", str, "debug, info, warning or error"),
    ("--log-format", "observability.log_format", str, "json or text"),
)

# Flag of `generate`, field of SamplingParams, type, help.
_SAMPLING: tuple[tuple[str, str, Callable[[str], Any], str], ...] = (
    ("--max-tokens", "max_tokens", int, "most tokens to generate"),
    ("--min-tokens", "min_tokens", int, "no end before so many tokens"),
    ("--temperature", "temperature", float, "0 is greedy"),
    ("--top-p", "top_p", float, "nucleus sampling"),
    ("--top-k", "top_k", int, "keep the k most probable tokens"),
    ("--min-p", "min_p", float, "keep tokens of at least so many times the highest probability"),
    ("--repetition-penalty", "repetition_penalty", float, "of tokens in prompt or output"),
    ("--frequency-penalty", "frequency_penalty", float, "of tokens in the output, per occurrence"),
    ("--presence-penalty", "presence_penalty", float, "of tokens in the output"),
    ("--seed", "seed", int, "the same seed gives the same text"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    arguments = build_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except StartupError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STARTUP
    except BrokenPipeError:  # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftline-server",
        description="Serves a target model over gRPC, sped up by speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=f"draftline-server {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_generate(commands)
    return parser


def _add_serve(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model pair",
        description="Serves a target model and, if there is one, a draft model. Settings come from a YAML "
        "file, or are the defaults with --target; flags override single keys of either.",
        epilog="Exit codes: 0 drained after SIGTERM or Ctrl-C; 1 the engine failed; 2 it could not start; "
        "130 a second Ctrl-C ended it at once.",
    )
    parser.set_defaults(run=_serve)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="configuration file (YAML)")
    source.add_argument("--target", metavar="DIR", help="directory of the target model")
    parser.add_argument("--draft", metavar="DIR", help="directory of the draft model; only with --target")
    for flag, key, kind, text in _OVERRIDES:
        parser.add_argument(flag, dest=key, type=kind, metavar="VALUE", help=f"{text} ({key})")


def _add_generate(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="stream a completion from a running server",
        description="Streams one completion to stdout; statistics go to stderr when it is complete. "
        "Without --prompt the prompt is read from stdin.",
    )
    parser.set_defaults(run=_generate)
    parser.add_argument("--address", default="localhost:50051", help="host:port (default: %(default)s)")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's chat message")
    parser.add_argument(
        "--no-speculation", action="store_true", help="decode with the target alone (the same output, slower)"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so many seconds")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    for flag, name, kind, text in _SAMPLING:
        parser.add_argument(flag, dest=name, type=kind, metavar="VALUE", help=text)


def _serve(arguments: argparse.Namespace) -> int:
    config = _read_config(arguments)
    configure_logging(level=config.observability.log_level, log_format=config.observability.log_format)
    # Imported late: gRPC takes a moment, which --help and a wrong key should not cost.
    from draftline_server.app import load_pair, run

    return run(config, load_pair)


def _read_config(arguments: argparse.Namespace) -> Config:
    overrides = {key: getattr(arguments, key) for _, key, _, _ in _OVERRIDES}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if arguments.config is not None:
        if arguments.draft is not None:
            raise ConfigError("--draft: only with --target; with --config set models.draft_model.path")
        return load_config(arguments.config, overrides)
    models = {"target_model": {"path": arguments.target}}
    if arguments.draft is not None:
        models["draft_model"] = {"path": arguments.draft}
    return parse_config(with_overrides({"models": models}, overrides))


def _generate(arguments: argparse.Namespace) -> int:
    from draftline_server.rpc.client import (
        CallFailedError,
        CompletionOptions,
        describe_summary,
        stream_completion,
    )

    prompt = arguments.prompt if arguments.prompt is not None else sys.stdin.read()
    sampling = {name: getattr(arguments, name) for _, name, _, _ in _SAMPLING}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    options = CompletionOptions(
        prompt=prompt,
        is_chat=arguments.chat,
        sampling={**sampling, "stop": arguments.stop, "ignore_eos": arguments.ignore_eos},
        use_speculation=not arguments.no_speculation,
        timeout_seconds=arguments.timeout,
    )
    shown: list[str] = []
    try:
        summary = stream_completion(arguments.address, options, lambda text: _show(text, shown))
    except CallFailedError as error:
        _end_line(shown)
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    _end_line(shown)
    print(f"[{describe_summary(summary)}]", file=sys.stderr)
    return 0


def _show(text: str, shown: list[str]) -> None:
    if text:
        shown[:] = [text]
    sys.stdout.write(text)
    sys.stdout.flush()


def _end_line(shown: list[str]) -> None:
    """Ends the line of a text that does not end with one, so that what follows has its own."""
    if shown and not shown[0].endswith("\n"):
        print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
